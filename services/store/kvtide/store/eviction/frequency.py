"""Least frequently used, alone and with the place in the chain (LengthAware)."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtide.store.eviction.lines import NONE
from kvtide.store.eviction.policy import Eviction

MOST_USES = 255
MOST_DEPTH = 511


@dataclass(slots=True)
class _Ranks:
    """The lists of one line by (uses, depth), and as bits which of them exist."""

    uses: int = 0
    depths: dict[int, int] = field(default_factory=dict[int, int])
    lists: dict[tuple[int, int], int] = field(
        default_factory=dict[tuple[int, int], int]
    )


class Lfu(Eviction):
    """The block used least often goes first; among equals the longest unused.

    Uses are counted while the block is here, up to ``MOST_USES``.
    """

    def __init__(self) -> None:
        """No slots and no lines yet."""
        super().__init__()
        self._uses = array("B")
        self._depth = array("H")
        self._ranks: dict[int, _Ranks] = {}
        self._standing = array("i")
        self._numbers = 0

    def add_slots(self, count: int) -> None:
        """See ``Eviction.add_slots``."""
        super().add_slots(count)
        self._uses.extend([0] * count)
        self._depth.extend([0] * count)
        self._standing.extend([NONE] * count)

    def add_line(self) -> int:
        """See ``Eviction.add_line``."""
        self._numbers += 1
        self._ranks[self._numbers] = _Ranks()
        return self._numbers

    def drop_line(self, line: int) -> None:
        """See ``Eviction.drop_line``."""
        del self._ranks[line]

    def begin(self, slot: int, identity: int, depth: int) -> None:
        """See ``Eviction.begin``."""
        del identity, depth
        self._uses[slot] = 0

    def enter(self, line: int, slot: int) -> None:
        """See ``Eviction.enter``."""
        ranks, rank = self._ranks[line], (self._uses[slot], self._depth[slot])
        number = ranks.lists.get(rank)
        if number is None:
            number = ranks.lists[rank] = self._lines.add_line()
            uses, depth = rank
            ranks.uses |= 1 << uses
            ranks.depths[uses] = ranks.depths.get(uses, 0) | 1 << depth
        self._lines.append(number, slot)
        self._standing[slot] = line

    def leave(self, slot: int) -> None:
        """See ``Eviction.leave``."""
        number = self._lines.line_of(slot)
        super().leave(slot)
        if self._lines.length(number) > 0:
            return
        self._lines.drop_line(number)
        uses, depth = self._uses[slot], self._depth[slot]
        ranks = self._ranks[self._standing[slot]]
        del ranks.lists[uses, depth]
        ranks.depths[uses] ^= 1 << depth
        if not ranks.depths[uses]:
            del ranks.depths[uses]
            ranks.uses ^= 1 << uses

    def use(self, slot: int) -> None:
        """See ``Eviction.use``."""
        stands = slot in self
        line = self._standing[slot]
        if stands:
            self.leave(slot)
        self._uses[slot] = min(MOST_USES, self._uses[slot] + 1)
        if stands:
            self.enter(line, slot)

    def next(self, line: int) -> int:
        """See ``Eviction.next``."""
        ranks = self._ranks[line]
        if not ranks.uses:
            return NONE
        uses = _lowest(ranks.uses)
        depth = ranks.depths[uses].bit_length() - 1
        return self._lines.oldest(ranks.lists[uses, depth])

    def walk(self, line: int) -> Iterator[int]:
        """See ``Eviction.walk``."""
        lists = self._ranks[line].lists
        for rank in sorted(lists, key=lambda rank: (rank[0], -rank[1])):
            yield from self._lines.walk(lists[rank])


class LengthAware(Lfu):
    """The paper's: as LFU, and among equals the block that is later in its chain.

    arXiv 2407.00079, table 1, describes it as like LFU, but evicting blocks that occur
    later in requests first; that leaves room for other readings than this one.
    """

    def begin(self, slot: int, identity: int, depth: int) -> None:
        """See ``Eviction.begin``."""
        super().begin(slot, identity, depth)
        self._depth[slot] = min(depth, MOST_DEPTH)


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
