"""How many HTTP connections there may be; imports no server, for settings name it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``connections`` at a time; more are answered with 503 and closed at once.

    One whose client takes not a byte of what waits for it, for ``stall_s`` to twice
    that, is cut: its request then ends like that of any client that left. So is one
    whose request's head is not there ``head_s`` after its first byte, or after the
    connection was made.
    """

    connections: int
    stall_s: float
    head_s: float = 15.0
