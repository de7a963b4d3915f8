"""What an eviction policy is: which of the slots that may go, goes next."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from kvtide.store.eviction.lines import Lines


class Eviction(ABC):
    """Slots are numbers in lines; a line is a size, a tenant, or whatever one asks.

    A slot's use begins with ``begin``. From ``enter`` to ``leave`` or ``evict`` it may
    be a victim; in between it may leave and come back (a pin), and what is known of it
    stays. Every operation takes constant time, ``next`` on average over many.
    """

    def __init__(self) -> None:
        """No slots and no lines yet."""
        self._lines = Lines()

    def add_slots(self, count: int) -> None:
        """Make room for ``count`` more slots."""
        self._lines.add_slots(count)

    def __contains__(self, slot: int) -> bool:
        """Whether the slot stands in a line."""
        return slot in self._lines

    @abstractmethod
    def add_line(self) -> int:
        """A new line's number."""

    @abstractmethod
    def drop_line(self, line: int) -> None:
        """An empty line is needed no more."""

    @abstractmethod
    def begin(self, slot: int, identity: int, depth: int) -> None:
        """The slot is another block from now on; it stands in no line.

        ``identity`` is the block's, equal whenever it comes again. ``depth`` is its
        place in its chain, 0 for the first or where it is not known.
        """

    @abstractmethod
    def enter(self, line: int, slot: int) -> None:
        """The slot may be a victim, as the latest to come."""

    @abstractmethod
    def use(self, slot: int) -> None:
        """The slot was used again, whether it stands in a line or not."""

    @abstractmethod
    def next(self, line: int) -> int:
        """The slot of the line that goes next, or ``NONE`` if there is none."""

    @abstractmethod
    def walk(self, line: int) -> Iterator[int]:
        """The slots of a line about in the order in which they would go."""

    def leave(self, slot: int) -> None:
        """The slot may not be a victim for now, or its use ends by another way."""
        self._lines.remove(slot)

    def evict(self, slot: int, identity: int) -> None:
        """The slot's block goes to make room; the slot leaves its line."""
        del identity
        self.leave(slot)
