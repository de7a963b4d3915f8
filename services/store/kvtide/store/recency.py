"""Least recently used order of slots, one line for each size class, by column."""

from array import array

NONE = -1
_UNLINKED = -2


class Recency:
    """Linked lists in arrays: append, remove and oldest take constant time."""

    def __init__(self) -> None:
        """No slots and no lines yet."""
        self._older = array("i")
        self._newer = array("i")
        self._oldest: list[int] = []
        self._newest: list[int] = []

    def add_slots(self, count: int) -> None:
        """Make room for ``count`` more slots, none of them in a line."""
        self._older.extend([_UNLINKED] * count)
        self._newer.extend([_UNLINKED] * count)

    def add_line(self) -> int:
        """A new line's number."""
        self._oldest.append(NONE)
        self._newest.append(NONE)
        return len(self._oldest) - 1

    def __contains__(self, slot: int) -> bool:
        """Whether the slot stands in a line."""
        return self._older[slot] != _UNLINKED

    def oldest(self, line: int) -> int:
        """The slot at the front, or ``NONE``."""
        return self._oldest[line]

    def append(self, line: int, slot: int) -> None:
        """Put a slot at the end: it is the most recently used now."""
        last = self._newest[line]
        self._older[slot], self._newer[slot] = last, NONE
        if last == NONE:
            self._oldest[line] = slot
        else:
            self._newer[last] = slot
        self._newest[line] = slot

    def remove(self, line: int, slot: int) -> None:
        """Take a slot out of its line."""
        older, newer = self._older[slot], self._newer[slot]
        if older == NONE:
            self._oldest[line] = newer
        else:
            self._newer[older] = newer
        if newer == NONE:
            self._newest[line] = older
        else:
            self._older[newer] = older
        self._older[slot] = self._newer[slot] = _UNLINKED
