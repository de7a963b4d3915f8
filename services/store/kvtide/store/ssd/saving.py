"""Blocks that only DRAM has are copied to the SSD ahead of need. Pure.

So a store that is killed loses the latest blocks only, not the heads of chains that it
used most and that would have been the last to be demoted; and a burst finds blocks that
can be dropped at once. They are written in the order in which they came, each once it is
old enough, where that pushes nothing out: the SSD has room, or is much larger than the
arena. Such a block stays in DRAM, and where it stands among the others.
"""

from kvtide.store.slots import SlotState
from kvtide.store.ssd.books import Books
from kvtide.store.unsaved import Unsaved

MUCH_LARGER = 4


class Saving:
    """Which block is next."""

    def __init__(self, books: Books) -> None:
        """From now on the inventory tells of blocks that come and go."""
        self._books = books
        self._unsaved = Unsaved()
        self.flushing = False
        if books.rules.capacity_bytes:
            books.inventory.unsaved = self._unsaved

    def __len__(self) -> int:
        """Blocks that wait."""
        return len(self._unsaved)

    def flush(self, now_s: float) -> None:
        """The store ends: all that has no record is due, however new it is."""
        self.flushing = True
        table = self._books.inventory.table
        for slot, state in enumerate(table.state):
            if state != SlotState.COMMITTED or table.key[slot] is None:
                continue
            if slot not in self._unsaved:
                self._unsaved.add(slot, now_s)

    def next_slot(self) -> tuple[int, float] | None:
        """The block that is next, and from when on; None: there is none."""
        books = self._books
        if not (self.flushing or books.rules.save_s):
            return None
        while (first := self._unsaved.first()) is not None:
            slot, since_s = first
            key = books.inventory.table.key[slot]
            known = key is None or books.entries.find(key) is not None
            if not known and not books.inventory.is_extra(slot):
                return slot, 0.0 if self.flushing else since_s + books.rules.save_s
            self._unsaved.discard(slot)
        return None

    def has_room(self, slot: int) -> bool:
        """Whether the block may be written without pushing out what is worth more."""
        segments, rules = self._books.segments, self._books.rules
        table = self._books.inventory.table
        length = rules.record_bytes(table.slot_bytes(slot))
        if not segments.room_for(length, segments.segment_bytes):
            return False
        if self.flushing or rules.capacity_bytes >= MUCH_LARGER * table.arena_bytes:
            return True
        return segments.used_bytes + length <= rules.ssd_low * rules.capacity_bytes

    def begun(self, slot: int) -> None:
        """It is being written."""
        self._unsaved.discard(slot)

    def failed(self, slot: int, now_s: float) -> None:
        """It could not be written, and is still there."""
        self._unsaved.add(slot, now_s)
