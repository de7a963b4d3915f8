"""The tier's blocks and bytes in step: rows, places, and what others are told. Pure."""

from kvtide.kv import BlockKey, Located, SlotRef, Tier
from kvtide.store.events import BlockRow, GoneRow, Verify
from kvtide.store.inventory import Inventory
from kvtide.store.spaces import Space
from kvtide.store.ssd.entries import Block, Entries, RowState
from kvtide.store.ssd.events import FoundRecord
from kvtide.store.ssd.rules import SsdRules
from kvtide.store.ssd.segments import Place, Segments
from kvtide.store.tally import Tally

SSD_ARENA = 0


class Books:
    """See the module. ``era`` grows whenever all is forgotten.

    A descriptor of the tier has the row as its offset: where the record lies is the
    store's own business, and changes when a segment is cleaned.
    """

    def __init__(self, inventory: Inventory, tally: Tally, rules: SsdRules) -> None:
        """Nothing is there."""
        self.inventory = inventory
        self.tally = tally
        self.rules = rules
        self.era = 0
        # the size of slots that are asked for at present
        self.slot_bytes = 0
        self.entries = Entries()
        self.segments = Segments(rules.capacity_bytes, rules.segment_bytes)
        self._lsn = 0
        self._number = 0
        self._first_number = 1

    def next_number(self) -> int:
        """For an operation of the device."""
        self._number += 1
        return self._number

    def is_current(self, number: int) -> bool:
        """Whether an operation was begun since all was last forgotten."""
        return number >= self._first_number

    def next_lsn(self) -> int:
        """For a record."""
        self._lsn += 1
        return self._lsn

    # ---- blocks

    def reserve(self, block: Block) -> int:
        """A row for a block that is to be written, of a space that has slots or rows."""
        self.inventory.spaces.join(self.inventory.spaces[block.space])
        return self.entries.reserve(block)

    def unreserve(self, row: int) -> None:
        """It was not written after all."""
        self.inventory.spaces.leave(self.entries.space(row))
        self.entries.free(row)

    def add(self, row: int, place: Place, lsn: int, now_s: float) -> None:
        """A reserved row's record can be read: everyone hears of it.

        The place is live already, in the segments' account.
        """
        before = self.entries.find(self.entries.key(row))
        if before is not None:
            self.drop(before, "superseded", now_s)
        table = self.inventory.table
        generation = table.next_generation
        table.next_generation += 1
        self.entries.settle(row, place, lsn, generation)
        self.inventory.came(self.row(row), now_s)

    def drop(self, row: int, reason: str, now_s: float) -> None:
        """A live row's block can't be had from here any more."""
        entries = self.entries
        gone = GoneRow(entries.key(row), entries.generation[row], reason, Tier.SSD)
        self.segments.died(entries.place(row))
        self.inventory.spaces.leave(entries.space(row))
        entries.free(row)
        self.inventory.gone(gone, now_s)

    def find_record(self, record: FoundRecord, now_s: float) -> None:
        """A record of an earlier life; of two of one key the newer counts."""
        self._lsn = max(self._lsn, record.lsn)
        entries = self.entries
        before = entries.find(record.key)
        if before is not None and entries.lsn(before) >= record.lsn:
            return
        space = Space(record.tags, record.slot_bytes, record.header_bytes)
        number = self.inventory.spaces.join(space)
        row = entries.reserve(
            Block(record.key, number, record.tokens, record.made, record.header_xxh3)
        )
        self.segments.found_record(record.place, row)
        self.add(row, record.place, record.lsn, now_s)

    def clear(self, reason: str, now_s: float) -> None:
        """Forget everything, and say so."""
        while (row := self.entries.coldest()) is not None:
            self.drop(row, reason, now_s)
        for row, state in enumerate(self.entries.state):
            # what is being written ends for nothing
            if state == RowState.RESERVED:
                self.unreserve(row)
        self.era += 1
        self._first_number = self._number + 1
        self.entries = Entries()
        self.segments = Segments(self.rules.capacity_bytes, self.rules.segment_bytes)

    # ---- looking

    def located(self, row: int) -> Located:
        """The descriptor of a live row."""
        entries, store = self.entries, self.inventory.store
        block = entries.block(row)
        slot = SlotRef(
            node=store.node,
            epoch=store.epoch,
            tier=Tier.SSD,
            arena=SSD_ARENA,
            offset=row,
            length=self.inventory.spaces[block.space].slot_bytes,
            generation=entries.generation[row],
        )
        return Located(block.key, slot, block.header_xxh3)

    def find(self, key: BlockKey) -> Located | None:
        """The descriptor of a key's copy here."""
        row = self.entries.find(key)
        return None if row is None else self.located(row)

    def row(self, row: int) -> BlockRow:
        """The catalog's row."""
        block = self.entries.block(row)
        tags = self.inventory.spaces[block.space].tags
        return BlockRow(self.located(row), Tier.SSD, block.tokens, tags)

    def space(self, row: int) -> Space:
        """What the row's block belongs to."""
        return self.inventory.spaces[self.entries.space(row)]

    def wanted(self, row: int, *, slot: int = 0, offset: int = 0) -> Verify:
        """What the record of a row must hold; ``slot`` and ``offset`` as given."""
        block, space = self.entries.block(row), self.space(row)
        return Verify(
            slot=slot,
            generation=block.made,
            offset=offset,
            slot_bytes=space.slot_bytes,
            header_bytes=space.header_bytes,
            key=block.key,
            tags=space.tags,
            tokens=block.tokens,
            header_xxh3=block.header_xxh3,
        )
