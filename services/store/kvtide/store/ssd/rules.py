"""What bounds the SSD tier."""

from dataclasses import dataclass

from kvtide.store.ssd.format import record_bytes


@dataclass(frozen=True, slots=True)
class SsdRules:
    """Times in seconds; ``capacity_bytes`` 0: there is no tier.

    ``dram_high`` and ``dram_low`` are shares of the arena: above the first, cold blocks
    are demoted until no more than the second is in use. ``ssd_high`` and ``ssd_low``
    are the same for eviction from the SSD. ``clean_below`` is the live share under
    which a segment is cleaned without need. ``write_wait_s`` is how long reads may
    hold up a write. A block that only DRAM has is saved when it is ``save_s`` old; 0: never.
    ``sealed``: what is written is encrypted.
    """

    capacity_bytes: int = 0
    segment_bytes: int = 64 << 20
    write_bytes_per_s: float = 200e6
    write_burst_s: float = 0.25
    writes: int = 2
    write_wait_s: float = 0.1
    save_s: float = 0.0
    dram_high: float = 0.9
    dram_low: float = 0.85
    ssd_high: float = 0.85
    ssd_low: float = 0.8
    clean_below: float = 0.5
    promote_hits: int = 2
    stage_share: float = 0.25
    stage_limit_s: float = 5.0
    retry_s: float = 1.0
    retry_most_s: float = 300.0
    calm_s: float = 60.0
    read_failures: int = 3
    stage_waiters: int = 4096
    sealed: bool = False

    def record_bytes(self, slot_bytes: int) -> int:
        """What a slot's image takes on the SSD when it is written now."""
        return record_bytes(slot_bytes, sealed=self.sealed)
