"""What is on its way over one RDMA rail."""

from collections import deque
from dataclasses import dataclass, field

from kvtide.transfer.requests import Request
from kvtide.transfer.verbs import Work


@dataclass(eq=False, slots=True)
class Flight:
    """A request whose bytes are on the way through a slot of the staging area.

    ``works`` are still to be posted, ``left`` have not completed; ``digests`` are a
    write's, of what lies in the slot.
    """

    number: int
    request: Request
    slot: int
    works: deque[Work] = field(default_factory=deque[Work])
    left: int = 0
    digests: list[int] = field(default_factory=list[int])
    progress_s: float = 0.0
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """Posted work requests; the last is signaled."""

    last_id: int
    count: int
    flight: Flight
