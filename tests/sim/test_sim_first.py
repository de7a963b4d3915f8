"""The machines of all roles together, in virtual time, through every kind of trouble.

Gateways, conductors, stores, prefill and decode workers run their production machines; a
made-up engine makes every token depend on every byte of KV before it.
"""

from unittest.mock import patch

import pytest
from tests.sim.sim_bugs import RepeatingFlow

from kvtide.bus import Incoming, NetworkFaults
from kvtide.bus.messages import Cancel, Message, Owned
from kvtide.gateway.life import Finish, answer
from kvtide.kv import Located, SpaceTags
from kvtide.sim import TROUBLES, Parts, Report, Scenario, Shape, Trouble, drawn
from kvtide.sim.__main__ import main, scenario
from kvtide.sim.decode import SimDecode
from kvtide.sim.engine import LAYOUT, SimRun
from kvtide.sim.pool import SimPool

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SEEDS = range(1, 3)
DRAWN = range(1, 51)
"""Mixtures of all troubles, in the default run; ``make sim-soak`` draws others."""
CROWDED = Shape(hosts=1, store_slots=14)
"""A store that must evict all the time."""
LATE = Trouble(NetworkFaults(delay_max_s=0.5, reorder=True))
"""News of blocks are old when they come."""


def finished(reports: list[Report]) -> int:
    ends = [end for one in reports for got in one.answers for end in got.ends]
    return sum(isinstance(end, Finish) for end in ends)


def judged(reports: list[Report]) -> None:
    wrong = [report.summary() for report in reports if report.violations]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", TROUBLES)
def test_each_request_ends_once_with_true_tokens_and_nothing_is_held(name: str) -> None:
    report = Scenario(1, TROUBLES[name]).run()
    judged([report])
    # not by refusing everything
    few = name in {"leave", "all"}
    assert finished([report]) >= len(report.answers) * (0.1 if few else 0.6)


def test_fifty_mixtures_of_all_troubles_do_no_harm() -> None:
    reports = [drawn(seed).run() for seed in DRAWN]
    judged(reports)
    asked = sum(len(report.answers) for report in reports)
    assert finished(reports) >= asked * 0.4


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_a_thousand_mixtures_do_no_harm_to_a_hundred_thousand_requests() -> None:
    for seed in range(51, 1051):
        judged([drawn(seed, questions=100).run()])


@pytest.mark.parametrize(
    ("name", "seed", "questions"),
    [("loss", 11, 10), ("crash", 138, 10), ("drawn", 54, 100), ("drawn", 66, 100)],
)
def test_what_once_failed_holds(name: str, seed: int, questions: int) -> None:
    judged([scenario(name, seed, questions).run()])


def test_a_store_that_always_evicts_is_only_slow() -> None:
    judged([Scenario(seed, LATE, shape=CROWDED, questions=30).run() for seed in SEEDS])


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_workers_that_wake_and_write_into_slots_of_others_change_no_answer() -> None:
    """Rare: in most of these histories no slot has a new owner in time."""
    stalls, shape = Trouble(stalls=12), Shape(hosts=1, store_slots=24, prefills=2)
    reports = [
        Scenario(seed, stalls, shape=shape, questions=80).run() for seed in range(1, 31)
    ]
    judged(reports)
    assert sum(report.strays for report in reports) > 0


def test_without_trouble_every_request_finishes() -> None:
    reports = [Scenario(seed, TROUBLES["none"]).run() for seed in SEEDS]
    judged(reports)
    assert finished(reports) == sum(len(report.answers) for report in reports)


def test_blocks_are_reused_across_turns_and_workers() -> None:
    report = Scenario(1, TROUBLES["none"]).run()
    ends = [end for got in report.answers for end in got.ends]
    assert sum(end.usage.cached_tokens for end in ends) > 0


def test_one_seed_is_one_history() -> None:
    one, other = (drawn(3).run() for _ in range(2))
    assert (one.messages, one.ended_s) == (other.messages, other.ended_s)
    assert [got.ids for got in one.answers] == [got.ids for got in other.answers]


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trouble", "none", "--seeds", "1:2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "none seed 1: ok",
        "none seed 2: ok",
        "2 simulations",
    ]


def test_a_soak_draws_seeds_until_its_time_is_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--soak", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(lines) - 1} simulations, 0 wrong"


def test_a_failing_seed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(answer, "TokenFlow", RepeatingFlow):
        assert main(["--trouble", "wild", "--seeds", "1:1"]) == 1
        assert main(["--trouble", "wild", "--seeds", "1:1", "--questions", "5"]) == 1
    output = capsys.readouterr().out
    assert "wild seed 1: WRONG" in output
    assert "is wrong" in output
    assert "--trouble wild --seeds 1\n" in output
    assert "--trouble wild --seeds 1 --questions 5\n" in output


# ---- planted bugs: a checker that never fails proves nothing


class TrustingPool(SimPool):
    """Believes that a slot still holds what its descriptor says."""

    async def read_block(
        self, located: Located, tags: SpaceTags, run: SimRun, block: int
    ) -> bool:
        raw = await self._read(located.slot, 0, located.slot.length)
        if raw is None:
            return False
        start = block * LAYOUT.block_tokens
        for number in range(LAYOUT.parts):
            at = LAYOUT.part_offset(number)
            part = raw[at : at + LAYOUT.part_bytes]
            run.part(number, start, start + LAYOUT.block_tokens)[:] = part
        return True


class DeafDecode(SimDecode):
    """Hears neither cancels nor its owners' lists."""

    async def _heard(self, incoming: Incoming) -> Message | None:
        if isinstance(incoming.message, Cancel | Owned):
            return None
        return await super()._heard(incoming)


def violations(
    trouble: Trouble,
    *,
    parts: Parts | None = None,
    shape: Shape | None = None,
    questions: int = 10,
) -> list[str]:
    """What the first seed that fails says."""
    for seed in range(1, 10):
        scenario = Scenario(
            seed, trouble, parts=parts, shape=shape, questions=questions
        )
        report = scenario.run()
        if report.violations:
            return [one.what for one in report.violations]
    return []


def test_reads_that_are_not_verified_are_caught() -> None:
    parts = Parts(pool=TrustingPool)
    found = violations(LATE, parts=parts, shape=CROWDED, questions=30)
    assert any("is wrong" in what for what in found)


def test_a_worker_that_frees_nothing_is_caught() -> None:
    found = violations(TROUBLES["leave"], parts=Parts(decode=DeafDecode))
    assert any("sequences" in what for what in found)
