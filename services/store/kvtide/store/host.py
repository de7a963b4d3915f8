"""How much memory the arena may have while others on the host need some too. Pure.

The arena takes idle memory, block by block. When the host has less left than its
reserve, or its processes wait for memory, the arena gives some back at each reading.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostRules:
    """When the arena shrinks, and how fast.

    ``reserve_bytes`` are the host's: below it the arena shrinks, below twice of it the
    arena does not grow.
    ``pressure_percent`` of time that processes wait for memory is too much. A reading
    gives back ``step_bytes`` at most, and never what is under ``floor_bytes``.
    """

    reserve_bytes: int = 512 << 20
    pressure_percent: float = 20.0
    step_bytes: int = 128 << 20
    floor_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class HostReading:
    """``available_bytes`` can be had without swapping, by the host and by this process.

    ``pressure_percent``: time, of the last ten seconds, in which some process waited.
    None: it can't be known here.
    """

    available_bytes: int | None
    pressure_percent: float | None = None


def arena_limit(
    rules: HostRules, reading: HostReading, *, backed_bytes: int, arena_bytes: int
) -> int:
    """How many bytes of the arena may have memory behind them from now on."""
    limit = arena_bytes
    available = reading.available_bytes
    if available is not None:
        # negative: that much must go
        spare = available - 2 * rules.reserve_bytes
        if rules.reserve_bytes <= available:
            spare = max(0, spare)
        limit = backed_bytes + spare
    pressure = reading.pressure_percent
    if pressure is not None and pressure > rules.pressure_percent:
        limit = min(limit, backed_bytes - rules.step_bytes)
    limit = max(limit, backed_bytes - rules.step_bytes, rules.floor_bytes)
    return min(limit, arena_bytes)
