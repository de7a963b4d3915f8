"""How fast copies load, and how much of a prefix is worth loading. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.bus.messages import LoadSample
from kvtide.kv import Located, NodeId, Tier
from kvtide.worker.pace import Pace
from kvtide.worker.steps import StepCost, StepShape

STORES_KEPT = 256

_Where = tuple[NodeId, Tier]


@dataclass(slots=True)
class _Measured:
    """The pace of loads from one place, in bytes per second."""

    pace: Pace = field(default_factory=lambda: Pace(0.0, seen=False))
    at_s: float = 0.0


class LoadRates:
    """Rates measured by store and tier; one that is old is forgotten, so that it is tried again."""

    def __init__(self, kept_s: float) -> None:
        """Nothing is measured."""
        self._kept_s = kept_s
        self._stores: OrderedDict[_Where, _Measured] = OrderedDict()
        self.all = Pace(1e9)
        self.tokens = Pace(0.0, seen=False)
        self.near: NodeId | None = None
        self.count = 0
        self.last: LoadSample | None = None

    def add(
        self,
        copies: Sequence[Located],
        tokens: int,
        size: int,
        ms: float,
        now_s: float,
        flows: int = 0,
        short: Located | None = None,
    ) -> None:
        """Loading ``size`` bytes of these copies took ``ms``, beside ``flows`` others.

        ``short`` was to come next and did not. At best it would have come now: so it is
        counted, which is nothing for a miss that was soon known, and much for a store
        that kept this worker waiting.
        """
        seconds = ms / 1000
        if seconds <= 0:
            return
        self.all.add(size, seconds)
        self.tokens.add(tokens, seconds)
        if copies and size > 0 and short is None:
            near = sum(copy.slot.node == self.near for copy in copies)
            near_bytes = size * near // len(copies)
            self.last = LoadSample(near_bytes, size - near_bytes, flows, ms)
            self.count += 1
        brought = Counter[_Where]()
        for copy in copies:
            brought[_where(copy)] += size // len(copies)
        if short is not None:
            brought[_where(short)] += short.slot.length
        for where, count in brought.items():
            measured = self._stores.setdefault(where, _Measured())
            measured.pace.add(count, seconds)
            measured.at_s = now_s
            self._stores.move_to_end(where)
        while len(self._stores) > STORES_KEPT:
            self._stores.popitem(last=False)

    def ms(self, copy: Located, now_s: float) -> float:
        """How long this copy will take; nothing if nobody knows."""
        measured = self._stores.get(_where(copy))
        if measured is None or now_s - measured.at_s > self._kept_s:
            return 0.0
        return measured.pace.seconds(copy.slot.length) * 1000


@dataclass(frozen=True, slots=True)
class Rest:
    """What is to be computed if nothing is loaded: tokens ``start`` … ``end`` - 1."""

    start: int
    end: int
    block_tokens: int


def worth_loading(
    copies: Sequence[Located],
    rest: Rest,
    rates: LoadRates,
    cost: StepCost,
    *,
    now_s: float,
    overlap: bool,
) -> int:
    """How many of the copies, from the first on, make load and compute end soonest.

    With ``overlap`` the slower of the two counts, else their sum; on equality the
    most. So a slow link makes a worker compute, by what both were measured to take.
    """
    best, best_ms, load_ms = 0, cost.ms(_left(rest, 0)), 0.0
    for count, copy in enumerate(copies, 1):
        load_ms += rates.ms(copy, now_s)
        compute_ms = cost.ms(_left(rest, count))
        total_ms = max(load_ms, compute_ms) if overlap else load_ms + compute_ms
        if total_ms <= best_ms:
            best, best_ms = count, total_ms
    return best


def _where(copy: Located) -> _Where:
    return copy.slot.node, copy.slot.tier


def _left(rest: Rest, blocks: int) -> StepShape:
    start = min(rest.start + blocks * rest.block_tokens, rest.end)
    return StepShape.of([(start, rest.end)]) if start < rest.end else StepShape(0, 0, 0)
