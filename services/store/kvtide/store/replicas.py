"""Which copies of other stores' blocks are wanted here, and which to fetch next. Pure.

Orders wait in lines by reason, drains first; a key stands in one line only, once. A
copy is fetched when there is room for its bytes under way and the rate allows it, from
one source after the other. What waits longer than its reason is good for is dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.bus.messages import ReplicaReason
from kvtide.kv import BlockKey, Located

MAX_SOURCES = 8

_ORDER = (
    ReplicaReason.DRAIN,
    ReplicaReason.PLACEMENT,
    ReplicaReason.HEAT,
    ReplicaReason.FILL,
)


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    """What copying may take. ``bytes_per_s`` is a mean over ``burst_s``."""

    queued: int = 16_384
    in_flight: int = 16
    in_flight_bytes: int = 64 << 20
    bytes_per_s: float = 256e6
    burst_s: float = 0.1
    wait_s: float = 60.0
    drain_wait_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy this, and report with the same number."""

    number: int
    source: Located
    reason: ReplicaReason


@dataclass(frozen=True, slots=True)
class Ordered:
    """What became of an order's keys."""

    here: int
    queued: int
    refused: int


@dataclass(slots=True)
class _Wanted:
    """A copy that is wanted until ``until_s``; sources not yet tried, best first."""

    reason: ReplicaReason
    sources: list[Located]
    until_s: float


Has = Callable[[BlockKey], bool]
"""Whether a key is here already."""


class Replicas:
    """See the module."""

    def __init__(self, rules: ReplicaRules) -> None:
        """Nothing is wanted."""
        self.expired = 0
        self._rules = rules
        self._lines: dict[ReplicaReason, OrderedDict[BlockKey, _Wanted]] = {
            reason: OrderedDict() for reason in _ORDER
        }
        self._under_way: dict[int, tuple[Fetch, _Wanted]] = {}
        self._fetched: set[BlockKey] = set()
        self._bytes = 0
        self._number = 0
        self._rate_free_s = float("-inf")

    @property
    def queued(self) -> int:
        """Copies that wait."""
        return sum(len(line) for line in self._lines.values())

    @property
    def under_way(self) -> int:
        """Copies that are being fetched."""
        return len(self._under_way)

    @property
    def bytes_under_way(self) -> int:
        """Their bytes."""
        return self._bytes

    # ---- orders

    def order(
        self,
        reason: ReplicaReason,
        located: Sequence[Located],
        has: Has,
        now_s: float,
    ) -> Ordered:
        """Take an order; what is here, wanted already or too much is not queued."""
        sources: dict[BlockKey, list[Located]] = {}
        for each in located:
            found = sources.setdefault(each.key, [])
            if len(found) < MAX_SOURCES:
                found.append(each)
        here = queued = refused = 0
        for key, found in sources.items():
            if has(key):
                here += 1
            elif self._want(reason, key, found, now_s):
                queued += 1
            else:
                refused += 1
        return Ordered(here, queued, refused)

    def _want(
        self, reason: ReplicaReason, key: BlockKey, found: list[Located], now_s: float
    ) -> bool:
        if key in self._fetched:
            return True
        known = self._unqueue(key)
        if known is not None and _rank(known.reason) < _rank(reason):
            reason = known.reason
        if known is None and self.queued >= self._rules.queued:
            return False
        rules = self._rules
        drain = reason is ReplicaReason.DRAIN
        until_s = now_s + (rules.drain_wait_s if drain else rules.wait_s)
        self._lines[reason][key] = _Wanted(reason, found, until_s)
        return True

    def _unqueue(self, key: BlockKey) -> _Wanted | None:
        for line in self._lines.values():
            found = line.pop(key, None)
            if found is not None:
                return found
        return None

    # ---- fetching

    def start(self, has: Has, now_s: float) -> list[Fetch]:
        """What to fetch now."""
        started: list[Fetch] = []
        for line in self._lines.values():
            while line:
                key, wanted = next(iter(line.items()))
                if has(key) or wanted.until_s <= now_s:
                    self.expired += wanted.until_s <= now_s
                    del line[key]
                    continue
                length = wanted.sources[0].slot.length
                if now_s < self._rate_free_s or not self._fits(length):
                    return started
                del line[key]
                started.append(self._fetch(key, wanted, now_s))
        return started

    def _fits(self, length: int) -> bool:
        if len(self._under_way) >= self._rules.in_flight:
            return False
        # a block that is larger than the limit goes alone
        fits = self._bytes + length <= self._rules.in_flight_bytes
        return fits or not self._under_way

    def _fetch(self, key: BlockKey, wanted: _Wanted, now_s: float) -> Fetch:
        source = wanted.sources.pop(0)
        self._number += 1
        fetch = Fetch(self._number, source, wanted.reason)
        self._under_way[fetch.number] = (fetch, wanted)
        self._fetched.add(key)
        self._bytes += source.slot.length
        rules = self._rules
        since_s = max(self._rate_free_s, now_s - rules.burst_s)
        self._rate_free_s = since_s + source.slot.length / rules.bytes_per_s
        return fetch

    def fetch(self, number: int) -> Fetch | None:
        """The fetch of that number, if it is under way."""
        found = self._under_way.get(number)
        return None if found is None else found[0]

    def end(self, number: int) -> None:
        """The copy is here, or not wanted any more."""
        self._end(number)

    def failed(self, number: int, now_s: float) -> bool:
        """This source would not do; true: another one will be tried."""
        wanted = self._end(number)
        if wanted is None or not wanted.sources or wanted.until_s <= now_s:
            return False
        key = wanted.sources[0].key
        line = self._lines[wanted.reason]
        line[key] = wanted
        line.move_to_end(key, last=False)
        return True

    def _end(self, number: int) -> _Wanted | None:
        found = self._under_way.pop(number, None)
        if found is None:
            return None
        fetch, wanted = found
        self._fetched.discard(fetch.source.key)
        self._bytes -= fetch.source.slot.length
        return wanted

    def clear(self) -> None:
        """Nothing that waits is wanted any more; what is under way ends by itself."""
        for line in self._lines.values():
            line.clear()

    def wake_at_s(self) -> float | None:
        """When ``start`` may next have something to do; None: not by time alone."""
        line = next((line for line in self._lines.values() if line), None)
        if line is None:
            return None
        first = next(iter(line.values()))
        if not self._fits(first.sources[0].slot.length):
            return first.until_s
        return min(first.until_s, self._rate_free_s)


def _rank(reason: ReplicaReason) -> int:
    return _ORDER.index(reason)
