"""Which block goes when room is needed: pure policies over slot numbers.

``Lru`` is the default; ``S3Fifo`` may be set for a store. ``Lfu`` and ``LengthAware``
need to know what a store does not (how deep in its chain a block is), and are for the
replay of traces.
"""

from enum import StrEnum

from kvtide.store.eviction.frequency import LengthAware, Lfu
from kvtide.store.eviction.lines import NONE, Lines
from kvtide.store.eviction.lru import Lru
from kvtide.store.eviction.policy import Eviction
from kvtide.store.eviction.s3_fifo import S3Fifo


class Policy(StrEnum):
    """The policies by name."""

    LRU = "lru"
    S3_FIFO = "s3fifo"
    LFU = "lfu"
    LENGTH_AWARE = "length-aware"

    def make(self) -> Eviction:
        """An instance without slots."""
        match self:
            case Policy.LRU:
                return Lru()
            case Policy.S3_FIFO:
                return S3Fifo()
            case Policy.LFU:
                return Lfu()
            case Policy.LENGTH_AWARE:
                return LengthAware()


__all__ = ["NONE", "Eviction", "LengthAware", "Lfu", "Lines", "Lru", "Policy", "S3Fifo"]
