"""Least recently used."""

from collections.abc import Iterator

from kvtide.store.eviction.policy import Eviction


class Lru(Eviction):
    """The longest unused goes first. Who touches a chain tail first evicts it so."""

    def add_line(self) -> int:
        """See ``Eviction.add_line``."""
        return self._lines.add_line()

    def drop_line(self, line: int) -> None:
        """See ``Eviction.drop_line``."""
        self._lines.drop_line(line)

    def begin(self, slot: int, identity: int, depth: int) -> None:
        """See ``Eviction.begin``; nothing is remembered of a slot but its place."""

    def enter(self, line: int, slot: int) -> None:
        """See ``Eviction.enter``."""
        self._lines.append(line, slot)

    def use(self, slot: int) -> None:
        """See ``Eviction.use``."""
        if slot in self._lines:
            line = self._lines.line_of(slot)
            self._lines.remove(slot)
            self._lines.append(line, slot)

    def next(self, line: int) -> int:
        """See ``Eviction.next``."""
        return self._lines.oldest(line)

    def walk(self, line: int) -> Iterator[int]:
        """See ``Eviction.walk``."""
        return self._lines.walk(line)
