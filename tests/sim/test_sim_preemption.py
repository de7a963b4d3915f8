"""Decode workers with too little memory, through troubles: preempted answers stay true."""

from dataclasses import replace

import pytest

from kvtide.bus import Node
from kvtide.sim import TROUBLES, Parts, Scenario, Shape
from kvtide.sim.decode import SimDecode
from kvtide.sim.kernel import Kernel, Life
from kvtide.sim.pool import SimPool

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


class PressedDecode(SimDecode):
    """Slow, and with room for hardly more than one long request."""

    limits = replace(SimDecode.limits, growth_blocks=0)
    capacity_tokens = 320
    step_s = 0.1


@pytest.mark.parametrize("trouble", ["none", "loss", "pause", "crash", "wild"])
def test_preempted_requests_end_once_with_true_tokens(trouble: str) -> None:
    lives: list[SimDecode] = []

    class Counted(PressedDecode):
        def __init__(
            self, kernel: Kernel, life: Life, node: Node, pool: SimPool
        ) -> None:
            super().__init__(kernel, life, node, pool)
            lives.append(self)

    preempted = 0
    for seed in (1, 2):
        report = Scenario(
            seed,
            TROUBLES[trouble],
            parts=Parts(decode=Counted),
            shape=Shape(decodes=1),
            questions=20,
        ).run()
        assert not report.violations, report.summary()
        preempted += sum(life.machine.load().preempted for life in lives)
    assert preempted > 0
