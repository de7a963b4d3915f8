"""How much a conductor remembers, and for how long."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConductorLimits:
    """All durations in seconds, all counts of entries.

    A booking counts as load of its workers until they report: a report that comes
    ``settle_s`` or more after the booking contains it, and after ``unreported_s``
    without one the work has not come. ``booking_s`` bounds the life of a booking whose
    request never ends, and ``idle_s`` the age from which a gateway's word that it has
    no open requests ends it; ``answer_s`` how long a repeated ``Admit`` gets the very same
    answer; ``ended_s`` how long late messages of an ended request are known as such.
    ``pending_blocks`` that are being computed are followed, each at each worker.
    """

    settle_s: float = 0.3
    unreported_s: float = 3.0
    idle_s: float = 2.0
    booking_s: float = 900.0
    bookings: int = 200_000
    pending_blocks: int = 500_000
    answer_s: float = 30.0
    answers: int = 8192
    ended_s: float = 60.0
    ended: int = 100_000
    explanations: int = 2000
    swept_keys: int = 20_000
