"""Which blocks the SSD has: columns by row, not an object a block. Pure.

A row is RESERVED while its record is being written, and LIVE once it can be read. Only
live rows are in the index and in the order of last use.
"""

from array import array
from dataclasses import dataclass
from enum import IntEnum

from kvtide.kv import BlockKey
from kvtide.store.eviction import NONE, Lines
from kvtide.store.index import KeyIndex
from kvtide.store.ssd.format import PAGE_BYTES
from kvtide.store.ssd.segments import Place

MAX_HITS = 255


class RowState(IntEnum):
    """What a row is used for."""

    FREE = 0
    RESERVED = 1
    LIVE = 2


@dataclass(frozen=True, slots=True)
class Block:
    """What a row says of its block. ``made`` is the generation in the stored header."""

    key: BlockKey
    space: int
    tokens: int
    made: int
    header_xxh3: int


class Entries:
    """See the module."""

    def __init__(self) -> None:
        """No rows."""
        self.index = KeyIndex()
        self._order = Lines()
        self._line = self._order.add_line()
        self._free: list[int] = []
        self._key: list[BlockKey | None] = []
        self.state = array("B")
        self.hits = array("B")
        self.generation = array("Q")
        self._segment = array("I")
        self._page = array("I")
        self._pages = array("I")
        self._lsn = array("Q")
        self._made = array("Q")
        self._header_xxh3 = array("Q")
        self._space = array("I")
        self._tokens = array("I")

    def __len__(self) -> int:
        """Live rows."""
        return len(self.index)

    # ---- the life of a row

    def reserve(self, block: Block) -> int:
        """A row for a block whose record is about to be written."""
        row = self._free.pop() if self._free else self._grow()
        self.state[row] = RowState.RESERVED
        self.hits[row] = 0
        self._key[row] = block.key
        self._space[row], self._tokens[row] = block.space, block.tokens
        self._made[row], self._header_xxh3[row] = block.made, block.header_xxh3
        return row

    def settle(self, row: int, place: Place, lsn: int, generation: int) -> None:
        """The record can be read: the row is the most recently used live one.

        Its key is in no other live row.
        """
        self.state[row] = RowState.LIVE
        self.generation[row] = generation
        self.move(row, place, lsn)
        self.index.add(self.key(row), row)
        self._order.append(self._line, row)

    def move(self, row: int, place: Place, lsn: int) -> None:
        """The record lies elsewhere now."""
        self._segment[row] = place.segment
        self._page[row] = place.offset // PAGE_BYTES
        self._pages[row] = place.length // PAGE_BYTES
        self._lsn[row] = lsn

    def free(self, row: int) -> None:
        """The row's block is not here any more, or did not come."""
        if self.state[row] == RowState.LIVE:
            self.index.remove(self.key(row))
            self._order.remove(row)
        self.state[row] = RowState.FREE
        self._key[row] = None
        self._free.append(row)

    # ---- what it says

    def key(self, row: int) -> BlockKey:
        """The key of a row in use."""
        key = self._key[row]
        assert key is not None  # noqa: S101 - the row is in use
        return key

    def block(self, row: int) -> Block:
        """What the row is about."""
        return Block(
            key=self.key(row),
            space=self._space[row],
            tokens=self._tokens[row],
            made=self._made[row],
            header_xxh3=self._header_xxh3[row],
        )

    def place(self, row: int) -> Place:
        """Where its record lies."""
        return Place(
            self._segment[row],
            self._page[row] * PAGE_BYTES,
            self._pages[row] * PAGE_BYTES,
        )

    def lsn(self, row: int) -> int:
        """The number of its record."""
        return self._lsn[row]

    def space(self, row: int) -> int:
        """The number of the space that its block is of."""
        return self._space[row]

    def find(self, key: BlockKey) -> int | None:
        """The live row of a key."""
        return self.index.get(key)

    def is_use(self, row: int, generation: int) -> bool:
        """Whether the row is live, and in this use."""
        return self.state[row] == RowState.LIVE and self.generation[row] == generation

    # ---- the order of last use

    def touch(self, row: int) -> None:
        """The live row is the most recently used now."""
        self._order.remove(row)
        self._order.append(self._line, row)

    def hit(self, row: int) -> int:
        """As ``touch``; how often the row was hit by now."""
        self.touch(row)
        self.hits[row] = min(MAX_HITS, self.hits[row] + 1)
        return self.hits[row]

    def coldest(self) -> int | None:
        """The live row that was not used for longest."""
        row = self._order.oldest(self._line)
        return None if row == NONE else row

    def _grow(self) -> int:
        row = len(self.state)
        for small in (self.state, self.hits):
            small.append(0)
        for column in (self._segment, self._page, self._pages):
            column.append(0)
        for column in (self._space, self._tokens):
            column.append(0)
        for wide in (self.generation, self._lsn, self._made, self._header_xxh3):
            wide.append(0)
        self._key.append(None)
        self._order.add_slots(1)
        return row
