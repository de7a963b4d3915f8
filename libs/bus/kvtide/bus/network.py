"""What a network may do to packets: lose, repeat, delay, reorder, cut. Pure, seeded."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvtide.kv import NodeId


@dataclass(frozen=True, slots=True)
class Packet:
    """One message from one node on its way to one other (or itself)."""

    source: NodeId
    target: NodeId
    subject: str
    nbytes: int


_APART_S = 1e-6


class Network(Protocol):
    """Decides what becomes of each packet."""

    def plan(self, packet: Packet, now_s: float) -> tuple[float, ...]:
        """Seconds until each copy arrives; none: it is lost, two: it comes twice."""
        ...


class PerfectNetwork:
    """Everything arrives at once and once."""

    def plan(self, packet: Packet, now_s: float) -> tuple[float, ...]:
        """See ``Network.plan``."""
        del packet, now_s
        return (0.0,)


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Probabilities from 0 to 1 and delays in seconds, for each packet by itself.

    Without ``reorder`` the packets between two nodes arrive in the order they left.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    delay_min_s: float = 0.0
    delay_max_s: float = 0.0
    reorder: bool = False


@dataclass
class FaultyNetwork:
    """A network with faults that a seed decides: the same seed, the same faults."""

    seed: int
    faults: NetworkFaults = field(default_factory=NetworkFaults)

    def __post_init__(self) -> None:
        """Start with nothing cut."""
        self._random = random.Random(self.seed)  # noqa: S311 - not for secrets
        self._cut: set[tuple[NodeId, NodeId]] = set()
        self._slow_s: dict[NodeId, float] = {}
        self._last_s: dict[tuple[NodeId, NodeId], float] = {}
        self.lost = 0

    def cut(
        self, left: Iterable[NodeId], right: Iterable[NodeId], *, both: bool = True
    ) -> None:
        """Nothing goes from a node of ``left`` to one of ``right`` any more.

        Nor the other way, if ``both``.
        """
        others = tuple(right)
        for one in left:
            for other in others:
                self._cut.add((one, other))
                if both:
                    self._cut.add((other, one))

    def slow(self, node: NodeId, delay_s: float) -> None:
        """Whatever this node sends or gets takes so much longer, until ``heal``."""
        self._slow_s[node] = delay_s

    def heal(self) -> None:
        """Everything is connected again, and nobody is slow."""
        self._cut.clear()
        self._slow_s.clear()

    def plan(self, packet: Packet, now_s: float) -> tuple[float, ...]:
        """See ``Network.plan``."""
        way = (packet.source, packet.target)
        # draw first, so that a cut does not change what happens to later packets
        lost = self._random.random() < self.faults.loss
        copies = 2 if self._random.random() < self.faults.duplicate else 1
        delays = tuple(self._delay(packet, now_s) for _ in range(copies))
        if lost or way in self._cut:
            self.lost += 1
            return ()
        return delays

    def _delay(self, packet: Packet, now_s: float) -> float:
        faults = self.faults
        delay_s = self._random.uniform(faults.delay_min_s, faults.delay_max_s)
        if self._slow_s:
            ends = (packet.source, packet.target)
            delay_s += sum(self._slow_s.get(end, 0.0) for end in ends)
        if faults.reorder:
            return delay_s
        way = (packet.source, packet.target)
        # a little later than the one before: rounding must not reorder either
        last_s = self._last_s.get(way, float("-inf"))
        arrives_s = max(now_s + delay_s, last_s + _APART_S)
        self._last_s[way] = arrives_s
        return arrives_s - now_s
