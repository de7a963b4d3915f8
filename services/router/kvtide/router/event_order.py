"""In which order KV events count, and when some are missing. Pure.

A publisher numbers its messages from 0 and keeps the last ones for who asks. A number
that was left out is a gap; one that comes again is a repeat if its batch is no newer
than the last, else the publisher has begun anew.
"""

from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    """What to do with a message."""

    APPLY = "apply"
    IGNORE = "ignore"
    ASK = "ask"
    """Messages before it are missing: ask for those from ``EventOrder.next`` on."""
    AFRESH = "afresh"
    """Another life of the engine: forget all, then ask from 0."""


@dataclass(slots=True)
class EventOrder:
    """The number that comes next, and the time of the last batch."""

    next: int = 0
    wall_s: float = 0.0

    def live(self, number: int, wall_s: float) -> Step:
        """A message came as it was published."""
        if number == self.next:
            return Step.APPLY
        if number > self.next:
            return Step.ASK
        return Step.IGNORE if wall_s <= self.wall_s else Step.AFRESH

    def taken(self, number: int, wall_s: float) -> None:
        """It was applied."""
        self.next = number + 1
        self.wall_s = max(self.wall_s, wall_s)

    def restart(self) -> None:
        """Nothing is known."""
        self.next = 0
        self.wall_s = 0.0
