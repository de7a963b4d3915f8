"""Lines of slots, as linked lists in arrays: every operation takes constant time."""

from array import array
from collections.abc import Iterator

NONE = -1


class Lines:
    """Each slot stands in one line, or in none. Lines are numbers, used again."""

    def __init__(self) -> None:
        """No slots and no lines yet."""
        self._line = array("i")
        self._older = array("i")
        self._newer = array("i")
        self._oldest = array("i")
        self._newest = array("i")
        self._lengths = array("I")
        self._unused: list[int] = []

    def add_slots(self, count: int) -> None:
        """Make room for ``count`` more slots, none of them in a line."""
        nowhere = [NONE] * count
        for column in (self._line, self._older, self._newer):
            column.extend(nowhere)

    def add_line(self) -> int:
        """A new line's number."""
        if self._unused:
            return self._unused.pop()
        self._oldest.append(NONE)
        self._newest.append(NONE)
        self._lengths.append(0)
        return len(self._oldest) - 1

    def drop_line(self, line: int) -> None:
        """An empty line is needed no more; its number may be given out again."""
        self._unused.append(line)

    def __contains__(self, slot: int) -> bool:
        """Whether the slot stands in a line."""
        return self._line[slot] != NONE

    def line_of(self, slot: int) -> int:
        """Where the slot stands, or ``NONE``."""
        return self._line[slot]

    def length(self, line: int) -> int:
        """How many stand there."""
        return self._lengths[line]

    def oldest(self, line: int) -> int:
        """The slot at the front, or ``NONE``."""
        return self._oldest[line]

    def walk(self, line: int) -> Iterator[int]:
        """All slots of the line from its front; nobody may change it meanwhile."""
        slot = self._oldest[line]
        while slot != NONE:
            yield slot
            slot = self._newer[slot]

    def append(self, line: int, slot: int) -> None:
        """Put a slot that stands nowhere at the end."""
        last = self._newest[line]
        self._line[slot] = line
        self._older[slot], self._newer[slot] = last, NONE
        if last == NONE:
            self._oldest[line] = slot
        else:
            self._newer[last] = slot
        self._newest[line] = slot
        self._lengths[line] += 1

    def remove(self, slot: int) -> None:
        """Take a slot out of its line."""
        line, older, newer = self._line[slot], self._older[slot], self._newer[slot]
        if older == NONE:
            self._oldest[line] = newer
        else:
            self._newer[older] = newer
        if newer == NONE:
            self._newest[line] = older
        else:
            self._older[newer] = older
        self._line[slot] = NONE
        self._lengths[line] -= 1
