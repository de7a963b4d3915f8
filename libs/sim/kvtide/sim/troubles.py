"""The kinds of trouble that every simulation campaign goes through, by name."""

import random

from kvtide.bus import NetworkFaults
from kvtide.sim.cluster import Shape
from kvtide.sim.mischief import Trouble
from kvtide.sim.scenario import QUESTIONS, Scenario

_MILD = NetworkFaults(loss=0.01, duplicate=0.01, delay_max_s=0.01)
_DRAWN_SPAN_S = 10.0

TROUBLES: dict[str, Trouble] = {
    "none": Trouble(),
    "loss": Trouble(NetworkFaults(loss=0.05, duplicate=0.05, delay_max_s=0.02)),
    "wild": Trouble(
        NetworkFaults(loss=0.15, duplicate=0.1, delay_max_s=0.3, reorder=True)
    ),
    "crash": Trouble(_MILD, crashes=1),
    "pause": Trouble(_MILD, pauses=3),
    "stall": Trouble(_MILD, stalls=3),
    "cuts": Trouble(_MILD, cuts=3),
    "one-way": Trouble(_MILD, one_ways=4),
    "slow": Trouble(_MILD, slows=3),
    "clocks": Trouble(_MILD, steps=6, kills=2),
    "rot": Trouble(_MILD, rots=20, swaps=10),
    "leave": Trouble(_MILD, leavers=0.7),
    "all": Trouble(
        NetworkFaults(loss=0.05, duplicate=0.05, delay_max_s=0.1, reorder=True),
        crashes=1,
        pauses=1,
        cuts=1,
        leavers=0.2,
    ),
}
"""Loss, repetition, delay, reordering; crashes of each role; pauses; cuts, both ways
and one; slow processes, wrong clocks, spoilt memory; clients that leave."""


def drawn(seed: int, *, questions: int = QUESTIONS) -> Scenario:
    """A short simulation in which the seed also decides how much of what goes wrong."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    shape = Shape(
        hosts=draw.choice((1, 2, 2)),
        decodes=draw.choice((1, 2, 2)),
        store_slots=draw.choice((14, 40)),
    )
    return Scenario(seed, _mixture(draw), questions=questions, shape=shape)


def _mixture(draw: random.Random) -> Trouble:
    """Some of everything, often nothing of most."""

    def some(most: int) -> int:
        return max(0, draw.randint(-most, most))

    return Trouble(
        NetworkFaults(
            loss=draw.choice((0.0, 0.01, 0.05, 0.15)),
            duplicate=draw.choice((0.0, 0.01, 0.1)),
            delay_max_s=draw.choice((0.005, 0.02, 0.1, 0.3)),
            reorder=draw.random() < 0.5,  # noqa: PLR2004 - every other one
        ),
        kills=some(3),
        pauses=some(2),
        stalls=some(1),
        cuts=some(2),
        one_ways=some(2),
        slows=some(2),
        steps=some(3),
        rots=some(8),
        swaps=some(4),
        leavers=draw.choice((0.0, 0.2, 0.5)),
        span_s=_DRAWN_SPAN_S,
    )
