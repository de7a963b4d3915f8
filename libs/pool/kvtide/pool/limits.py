"""What bounds the pool's client."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Times in seconds."""

    list_every_s: float = 1.0
    arena_timeout_s: float = 3.0
    arena_retry_s: float = 0.5
    connect_timeout_s: float = 2.0
    unreachable_s: float = 1.0
    stage_timeout_s: float = 3.0
    settle_timeout_s: float = 5.0
    open_puts: int = 4096
    reports: int = 256
    report_again_s: float = 5.0
