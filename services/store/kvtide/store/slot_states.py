"""The states of a slot, how many there are of each, and the rules for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtide.store.accounts import ShareRules
from kvtide.store.eviction import Policy


class SlotState(IntEnum):
    """What a slot is used for. ``VACANT`` numbers belong to no slab at present."""

    VACANT = 0
    FREE = 1
    WRITING = 2
    COMMITTED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """``free + used + reserved + quarantined == total``, always."""

    total: int
    free: int
    used: int
    reserved: int
    quarantined: int
    used_bytes: int

    @classmethod
    def of(cls, by_state: Sequence[int], used_bytes: int) -> "SlotCounts":
        """From the number of slots in each ``SlotState``."""
        return cls(
            total=sum(by_state[SlotState.FREE :]),
            free=by_state[SlotState.FREE],
            used=by_state[SlotState.COMMITTED],
            reserved=by_state[SlotState.WRITING],
            quarantined=by_state[SlotState.QUARANTINED],
            used_bytes=used_bytes,
        )


@dataclass(frozen=True, slots=True)
class TableRules:
    """Who shares the slots, which go first, and how many a person may keep."""

    policy: Policy = Policy.LRU
    shares: ShareRules = field(default_factory=ShareRules)
    hard_pin_share: float = 0.5
