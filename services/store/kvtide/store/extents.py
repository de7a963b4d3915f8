"""Free ranges of a line of bytes, or of numbers: first fit, neighbours merged."""

from bisect import bisect_left


class Extents:
    """The free ranges of ``[0, length)``. Few ranges are expected; a take is linear."""

    def __init__(self, length: int) -> None:
        """Everything is free at first."""
        self.length = length
        self._starts: list[int] = [0] if length else []
        self._lengths: list[int] = [length] if length else []

    @property
    def free(self) -> int:
        """How much is free in all."""
        return sum(self._lengths)

    @property
    def largest(self) -> int:
        """The longest free range."""
        return max(self._lengths, default=0)

    @property
    def tail(self) -> int:
        """How much is free at the very end."""
        if not self._starts or self._starts[-1] + self._lengths[-1] < self.length:
            return 0
        return self._lengths[-1]

    def grow(self, length: int) -> None:
        """Make the line longer; what is new is free."""
        start = self.length
        self.length += length
        self.give(start, length)

    def take(self, length: int) -> int | None:
        """The start of a range of ``length`` that is no longer free; None: no room."""
        for i, have in enumerate(self._lengths):
            if have < length:
                continue
            start = self._starts[i]
            if have == length:
                del self._starts[i], self._lengths[i]
            else:
                self._starts[i] = start + length
                self._lengths[i] = have - length
            return start
        return None

    def give(self, start: int, length: int) -> None:
        """Make a range free that was taken."""
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and start + length == self._starts[i]:
            length += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i > 0 and self._starts[i - 1] + self._lengths[i - 1] == start:
            self._lengths[i - 1] += length
            return
        self._starts.insert(i, start)
        self._lengths.insert(i, length)

    def take_or_grow(self, length: int) -> int:
        """As ``take``; without room the line gets longer."""
        start = self.take(length)
        if start is None:
            start = self.length
            self.length += length
        return start
