"""S3-FIFO: most blocks are used once; a small queue finds them out quickly.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), algorithm 1.
"""

from array import array
from collections.abc import Iterator

from kvtide.store.eviction.ghost import Ghost
from kvtide.store.eviction.lines import NONE
from kvtide.store.eviction.policy import Eviction

SMALL_SHARE = 10
"""The small queue has a tenth of a line."""

MOST_USES = 3
PROMOTED_FROM = 2


class S3Fifo(Eviction):
    """New blocks queue in the small queue, those used there twice in the main one.

    What leaves the small queue unused is remembered for as long as the main queue is
    long: if it comes again, it goes to the main one at once. A use counts and moves
    nothing. A slot that leaves (a pin) comes back at the end of the queue it was in.
    """

    def __init__(self) -> None:
        """No slots and no lines yet."""
        super().__init__()
        self._ghost = Ghost()
        self._uses = array("B")
        self._main = array("B")
        self._in_main = 0
        self._queues: dict[int, int] = {}

    def add_slots(self, count: int) -> None:
        """See ``Eviction.add_slots``."""
        super().add_slots(count)
        self._uses.extend([0] * count)
        self._main.extend([0] * count)
        self._ghost.make_room(len(self._uses))

    def add_line(self) -> int:
        """See ``Eviction.add_line``: a small queue, and a main one beside it."""
        small = self._lines.add_line()
        self._queues[small] = self._lines.add_line()
        return small

    def drop_line(self, line: int) -> None:
        """See ``Eviction.drop_line``."""
        self._lines.drop_line(self._queues.pop(line))
        self._lines.drop_line(line)

    def begin(self, slot: int, identity: int, depth: int) -> None:
        """See ``Eviction.begin``."""
        del depth
        self._uses[slot] = 0
        self._main[slot] = self._ghost.take(identity, max(1, self._in_main))

    def enter(self, line: int, slot: int) -> None:
        """See ``Eviction.enter``."""
        main = self._main[slot]
        self._in_main += main
        self._lines.append(self._queues[line] if main else line, slot)

    def leave(self, slot: int) -> None:
        """See ``Eviction.leave``."""
        self._in_main -= self._main[slot]
        super().leave(slot)

    def evict(self, slot: int, identity: int) -> None:
        """See ``Eviction.evict``."""
        if not self._main[slot]:
            self._ghost.add(identity)
        self.leave(slot)

    def use(self, slot: int) -> None:
        """See ``Eviction.use``."""
        if self._uses[slot] < MOST_USES:
            self._uses[slot] += 1

    def next(self, line: int) -> int:
        """See ``Eviction.next``. Each step takes a use away, or a slot from small."""
        lines, main = self._lines, self._queues[line]
        while True:
            small = lines.length(line)
            total = small + lines.length(main)
            if small and (small * SMALL_SHARE >= total or small == total):
                slot = lines.oldest(line)
                if self._uses[slot] < PROMOTED_FROM:
                    return slot
                self._uses[slot], self._main[slot] = 0, 1
                self._in_main += 1
            else:
                slot = lines.oldest(main)
                if slot == NONE or self._uses[slot] == 0:
                    return slot
                self._uses[slot] -= 1
            lines.remove(slot)
            lines.append(main, slot)

    def walk(self, line: int) -> Iterator[int]:
        """See ``Eviction.walk``."""
        yield from self._lines.walk(line)
        yield from self._lines.walk(self._queues[line])
