"""What a store has done since its process began; each number only grows."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Tally:
    """Counters; the metric of each is ``kvtide_store_<name>_total``."""

    puts: int = 0
    stored: int = 0
    duplicates: int = 0
    existing: int = 0
    no_room: int = 0
    evicted: int = 0
    removed: int = 0
    corrupt_commits: int = 0
    stale_commits: int = 0
    stored_bytes: int = 0
    ssd_demoted: int = 0
    ssd_saved: int = 0
    ssd_demoted_bytes: int = 0
    ssd_compacted_bytes: int = 0
    ssd_evicted: int = 0
    ssd_promoted: int = 0
    ssd_corrupt: int = 0
    ssd_read_errors: int = 0
    ssd_write_errors: int = 0
    staged: int = 0
    stage_misses: int = 0
    stage_refused: int = 0
    bad_reports: int = 0
    bad_copies: int = 0
    leases_expired: int = 0
    fenced_messages: int = 0
    replicas_ordered: int = 0
    replicas_stored: int = 0
    replicas_corrupt: int = 0
    replicas_failed: int = 0
    replicas_refused: int = 0
    replicas_expired: int = 0
    replicas_no_room: int = 0
    extras_dropped: int = 0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The counters."""
        return tuple(field.name for field in fields(cls))
