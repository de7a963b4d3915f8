"""What a client did, counted from its start."""

import threading
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """Counters since the start; differences of two are an interval's.

    Attributes:
        lookups: questions for a prefix.
        lookup_keys: keys in them.
        hit_keys: keys that were there, from the first on.
        loaded_blocks: blocks that were loaded and verified.
        missed_blocks: blocks that could not be had: to be computed.
        loaded_bytes: bytes of the loaded ones.
        load_s: seconds that callers waited for loads.
        saved_blocks: blocks that the store took.
        present_blocks: blocks that were there already and not written again.
        refused_blocks: blocks that were not pooled: no room, no time, or away.
        saved_bytes: bytes of those that were written.
        save_s: seconds that callers waited for saves.
        timeouts: calls that ended at their limit.
        away: calls that were not made, because kvtide was away or had just failed.
    """

    lookups: int = 0
    lookup_keys: int = 0
    hit_keys: int = 0
    loaded_blocks: int = 0
    missed_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    saved_blocks: int = 0
    present_blocks: int = 0
    refused_blocks: int = 0
    saved_bytes: int = 0
    save_s: float = 0.0
    timeouts: int = 0
    away: int = 0

    def plus(self, other: "ClientCounts") -> "ClientCounts":
        """Both together."""
        return ClientCounts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in FIELDS)
        )

    def minus(self, other: "ClientCounts") -> "ClientCounts":
        """What came since ``other``."""
        return ClientCounts(
            *(getattr(self, each.name) - getattr(other, each.name) for each in FIELDS)
        )


FIELDS = fields(ClientCounts)


class Counter:
    """Adds up ``ClientCounts`` from several threads."""

    def __init__(self) -> None:
        """Nothing was done."""
        self._lock = threading.Lock()
        self._counts = ClientCounts()

    def add(self, counts: ClientCounts) -> None:
        """Add what was done."""
        with self._lock:
            self._counts = self._counts.plus(counts)

    def now(self) -> ClientCounts:
        """All so far."""
        return replace(self._counts)
