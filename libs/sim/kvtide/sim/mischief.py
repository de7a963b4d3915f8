"""What goes wrong in a simulation: when, and to whom, the seed decides."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.bus import FaultyNetwork, NetworkFaults
from kvtide.kv import Role
from kvtide.sim.cluster import Process, SimCluster

STALL_S = 6.0
STALL_SEARCH_S = 5.0
SLOW_BUS_S = 0.15
"""So much later comes what a slow node sends or gets."""
CLOCK_STEPS_S = (-3600.0, -5.0, 5.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What may go wrong; the seed decides when, and to whom.

    ``crashes`` are of each role, ``kills`` of any process; either comes back.
    ``pauses`` and ``cuts`` are of any process, ``stalls`` pauses of a prefill worker in
    the middle of a step, ``one_ways`` cuts in one direction only, ``slows`` processes
    that work and hear ten times slower, ``steps`` jumps of wall clocks. ``rots`` are
    flipped bits in blocks that a store has, ``swaps`` two such blocks of one size that
    change places. Everything happens within ``span_s`` of the first question, then all
    is well again.
    """

    faults: NetworkFaults = field(default_factory=NetworkFaults)
    crashes: int = 0
    kills: int = 0
    pauses: int = 0
    stalls: int = 0
    cuts: int = 0
    one_ways: int = 0
    slows: int = 0
    steps: int = 0
    rots: int = 0
    swaps: int = 0
    leavers: float = 0.0
    span_s: float = 20.0


class Mischief:
    """Does what a ``Trouble`` says to a cluster."""

    def __init__(
        self,
        trouble: Trouble,
        cluster: SimCluster,
        network: FaultyNetwork,
        draw: random.Random,
    ) -> None:
        """Nothing is drawn before ``begin``."""
        self._trouble = trouble
        self._cluster = cluster
        self._kernel = cluster.kernel
        self._network = network
        self._draw = draw

    def begin(self) -> None:
        """Decide what goes wrong, from now on."""
        trouble = self._trouble
        self._network.faults = trouble.faults
        for role in Role:
            for _ in range(trouble.crashes):
                self._crash_later(self._cluster.of(role))
        self._times(trouble.pauses, self._pause_later)
        self._times(trouble.stalls, self._stall_later)
        self._times(trouble.cuts, lambda: self._cut_later(both=True))
        self._times(trouble.kills, lambda: self._crash_later(self._all()))
        self._times(trouble.one_ways, lambda: self._cut_later(both=False))
        self._times(trouble.slows, self._slow_later)
        self._times(trouble.steps, self._step_later)
        self._times(trouble.rots, lambda: self._spoil_later(self._rot))
        self._times(trouble.swaps, lambda: self._spoil_later(self._swap))

    def end(self) -> None:
        """All is well again."""
        self._network.faults = NetworkFaults()
        self._network.heal()
        for process in self._all():
            process.life.slowness = 1.0

    def _times(self, count: int, call: Callable[[], None]) -> None:
        for _ in range(count):
            call()

    def _all(self) -> list[Process]:
        return list(self._cluster.processes.values())

    def _within(self, share: float) -> float:
        return self._draw.uniform(0.0, self._trouble.span_s * share)

    # ---- processes

    def _crash_later(self, among: list[Process]) -> None:
        process = self._draw.choice(among)
        at_s = self._within(0.6)
        back_s = at_s + self._draw.choice((0.3, 1.0, 5.0))

        def back() -> None:
            if not process.running:
                self._cluster.start(process)

        self._kernel.at(at_s, lambda: self._cluster.crash(process))
        self._kernel.at(back_s, back)

    def _pause_later(self) -> None:
        names = sorted(self._cluster.processes)
        process = self._cluster.processes[self._draw.choice(names)]
        at_s = self._within(0.6)
        seconds = self._draw.choice((1.0, 4.0, 7.0))
        self._kernel.at(at_s, lambda: self._cluster.pause(process, seconds))

    def _stall_later(self) -> None:
        kernel = self._kernel
        kernel.at(self._within(0.6), lambda: self._stall(kernel.now_s + STALL_SEARCH_S))

    def _stall(self, end_s: float) -> None:
        """Stop the first prefill worker that is found computing."""
        kernel = self._kernel
        for process in self._cluster.of(Role.PREFILL):
            prefill = process.prefill
            if prefill is None or process.life.paused_until_s > kernel.now_s:
                continue
            if prefill.machine.load().running:
                self._cluster.pause(process, STALL_S)
                return
        if kernel.now_s < end_s:
            kernel.at(0.005, lambda: self._stall(end_s))

    def _slow_later(self) -> None:
        process = self._draw.choice(self._all())

        def slow() -> None:
            process.life.slowness = 10.0
            self._network.slow(process.name, SLOW_BUS_S)

        self._kernel.at(self._within(0.6), slow)

    def _step_later(self) -> None:
        process = self._draw.choice(self._all())
        step_s = self._draw.choice(CLOCK_STEPS_S)
        self._kernel.at(
            self._within(0.8), lambda: self._cluster.step_clock(process, step_s)
        )

    # ---- the network

    def _cut_later(self, *, both: bool) -> None:
        at_s = self._within(0.7)
        names = sorted(self._cluster.processes)
        left = self._draw.sample(names, self._draw.randint(1, 3))
        right = [name for name in names if name not in left]
        if not both and self._draw.random() < 0.5:  # noqa: PLR2004 - either way
            left, right = right, left
        seconds = self._draw.choice((0.5, 2.0, 6.0))
        self._kernel.at(at_s, lambda: self._network.cut(left, right, both=both))
        self._kernel.at(at_s + seconds, self._network.heal)

    # ---- memory

    def _spoil_later(self, spoil: Callable[[list[memoryview]], None]) -> None:
        """``spoil`` gets the blocks of one store."""
        process = self._draw.choice(self._cluster.of(Role.STORE))

        def now() -> None:
            store = process.store
            if store is not None:
                spoil(store.blocks())

        self._kernel.at(self._within(1.0), now)

    def _rot(self, blocks: list[memoryview]) -> None:
        if blocks:
            block = self._draw.choice(blocks)
            block[self._draw.randrange(len(block))] ^= 1 << self._draw.randrange(8)

    def _swap(self, blocks: list[memoryview]) -> None:
        if len(blocks) > 1:
            one, other = self._draw.sample(blocks, 2)
            one[:], other[:] = bytes(other), bytes(one)
