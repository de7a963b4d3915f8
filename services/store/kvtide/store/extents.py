"""Free ranges of a line of bytes, or of numbers: first fit, neighbours merged."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


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

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All free ranges, as start and length, ascending."""
        return zip(list(self._starts), list(self._lengths), strict=True)

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """What is free of ``[start, end)``, as start and length."""
        first = max(0, bisect_right(self._starts, start) - 1)
        found: list[tuple[int, int]] = []
        for i in range(first, len(self._starts)):
            if self._starts[i] >= end:
                break
            low = max(start, self._starts[i])
            high = min(end, self._starts[i] + self._lengths[i])
            if low < high:
                found.append((low, high - low))
        return found

    def without(self, other: "Extents") -> Iterator[tuple[int, int]]:
        """What is free here but not in ``other``, as start and length."""
        for start, length in self:
            at, end = start, start + length
            for taken, taken_length in other.within(start, end):
                if at < taken:
                    yield at, taken - at
                at = taken + taken_length
            if at < end:
                yield at, end - at

    def fit(self, length: int) -> int | None:
        """Where the first free range of ``length`` starts; None: no room."""
        for start, have in zip(self._starts, self._lengths, strict=True):
            if have >= length:
                return start
        return None

    def take(self, length: int) -> int | None:
        """The start of a range of ``length`` that is no longer free; None: no room."""
        start = self.fit(length)
        if start is not None:
            self.cut(start, length)
        return start

    def cut(self, start: int, length: int) -> None:
        """Have nothing of a range free, whatever of it was."""
        for low, have in self.within(start, start + length):
            i = bisect_right(self._starts, low) - 1
            first, before = self._starts[i], low - self._starts[i]
            after = first + self._lengths[i] - (low + have)
            del self._starts[i], self._lengths[i]
            if after:
                self._starts.insert(i, low + have)
                self._lengths.insert(i, after)
            if before:
                self._starts.insert(i, first)
                self._lengths.insert(i, before)

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
