"""Blocks are written to the SSD: cold ones, to leave DRAM, and others ahead of need. Pure.

Which blocks are cold is the eviction policy's word: those that it would evict next. A
block that the SSD has already is dropped at once; any other is pinned while the device
copies, verifies and writes it, and dropped from DRAM when that is done. Where the
device can't keep up, blocks are evicted without it, as if there were no SSD.

A block that is only saved is not pinned, for that would change when it goes. If it goes
while it is written, the record counts all the same where its bytes are right.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtide.store.slabs import LookAway
from kvtide.store.slots import SlotState
from kvtide.store.ssd.books import Books
from kvtide.store.ssd.entries import Block
from kvtide.store.ssd.events import KillRecord, RecordDone, Trouble, WriteRecord
from kvtide.store.ssd.saving import Saving
from kvtide.store.ssd.segments import Place

PUT_MEMORY = 0.95
"""What remains, from put to put, of how much an earlier one wanted."""

BadSlot = Callable[[int, float], None]
"""The bytes of a slot are not what they should be: it is to be taken out of use."""


@dataclass(slots=True)
class _Demoted:
    """A block on its way. ``unwanted``: it was deleted meanwhile.

    ``look_away``: it is only saved, and not pinned.
    """

    era: int
    row: int
    place: Place
    lsn: int
    slot: int
    slot_bytes: int
    generation: int
    unwanted: bool = False
    look_away: LookAway | None = None


class Demotion:
    """See the module."""

    def __init__(self, books: Books, bad_slot: BadSlot) -> None:
        """Nothing is under way."""
        self._books = books
        self._bad_slot = bad_slot
        self.saving = Saving(books)
        self._under_way: dict[int, _Demoted] = {}
        # those that are only saved, by (slot, generation)
        self._saved: dict[tuple[int, int], _Demoted] = {}
        self._leaving_bytes = 0
        self._active = False
        self._full_bytes = books.inventory.table.arena_bytes
        self._evicted = 0
        self._put_bytes = 0.0
        # records that were written for nothing, as no scan may know
        self.void: list[KillRecord] = []

    def __len__(self) -> int:
        """Writes under way."""
        return len(self._under_way)

    def wanted(self) -> bool:
        """Whether DRAM is fuller than it should be."""
        rules, table = self._books.rules, self._books.inventory.table
        busy = table.busy_bytes
        if self._evicted != self._books.tally.evicted:
            # slots of a size can be all taken long before the arena's bytes are
            self._evicted = self._books.tally.evicted
            self._full_bytes = busy
        self._full_bytes = max(self._full_bytes, busy)
        busy -= self._leaving_bytes
        full = self._full_bytes
        # as much as a put has wanted lately should be free when the next one comes
        room = max((1 - rules.dram_high) * full, min(self._put_bytes, full / 2))
        more = (rules.dram_high - rules.dram_low) * full
        if busy > full - room:
            self._active = True
        elif busy <= full - room - more:
            self._active = False
        return self._active and self._books.slot_bytes > 0

    def expect(self, put_bytes: float) -> None:
        """A put wanted so much; the largest of the latest counts."""
        self._put_bytes = max(put_bytes, PUT_MEMORY * self._put_bytes)

    def victims(self) -> list[int]:
        """What would be evicted next; empty: nothing may be."""
        return self._books.inventory.table.victims(self._books.slot_bytes)

    def drop_clean(self, slot: int, now_s: float) -> bool:
        """Drop a block from DRAM that needs no writing; false: it does."""
        inventory = self._books.inventory
        key = inventory.table.key[slot]
        row = None if key is None else self._books.entries.find(key)
        if row is None and key is not None and not inventory.is_extra(slot):
            return False
        inventory.evict(slot, "demoted" if row is not None else "evicted", now_s)
        return True

    def takes_over(self, slot: int) -> bool:
        """Have a block that is being saved go once that is done; false: it is not."""
        table = self._books.inventory.table
        job = self._saved.pop((slot, table.generation[slot]), None)
        if job is None or job.look_away is None:
            return False
        job.look_away()
        job.look_away = None
        table.pin(slot)
        self._leaving_bytes += job.slot_bytes
        return True

    def start(self, slot: int, *, stays: bool = False) -> WriteRecord:
        """Have a block written; there is room for it. ``stays``: it is only saved."""
        books = self._books
        inventory, table = books.inventory, books.inventory.table
        wanted = inventory.check_of(slot, table.header_xxh3[slot])
        length = books.rules.record_bytes(wanted.slot_bytes)
        row = books.reserve(
            Block(
                key=wanted.key,
                space=table.space[slot],
                tokens=wanted.tokens,
                made=wanted.generation,
                header_xxh3=wanted.header_xxh3,
            )
        )
        place = books.segments.append(length, row)
        lsn, number = books.next_lsn(), books.next_number()
        job = self._under_way[number] = _Demoted(
            era=books.era,
            row=row,
            place=place,
            lsn=lsn,
            slot=slot,
            slot_bytes=wanted.slot_bytes,
            generation=wanted.generation,
        )
        self.saving.begun(slot)
        if stays:
            job.look_away = table.look(slot)
            self._saved[slot, job.generation] = job
        else:
            table.pin(slot)
            self._leaving_bytes += wanted.slot_bytes
        return WriteRecord(number, place, lsn, wanted)

    def delete(self, covers: Callable[[int], bool]) -> None:
        """Let nothing come of writes for which ``covers(row)`` holds."""
        for job in self._under_way.values():
            if job.era == self._books.era and covers(job.row):
                job.unwanted = True

    def done(self, done: RecordDone, now_s: float) -> bool:
        """A write ended; false: it is not one of these."""
        job = self._under_way.pop(done.number, None)
        if job is None:
            return False
        books = self._books
        stored = done.trouble is None and not job.unwanted
        if job.era == books.era:
            books.segments.landed(job.place, live=stored)
            if stored:
                books.add(job.row, job.place, job.lsn, now_s)
                if job.look_away is None:
                    books.tally.ssd_demoted += 1
                else:
                    books.tally.ssd_saved += 1
            else:
                books.unreserve(job.row)
                if job.unwanted:
                    self.void.append(KillRecord(job.place, job.lsn))
            books.tally.ssd_demoted_bytes += job.place.length
        self._let_go(job, done, stored=stored and job.era == books.era, now_s=now_s)
        return True

    def _let_go(
        self, job: _Demoted, done: RecordDone, *, stored: bool, now_s: float
    ) -> None:
        inventory = self._books.inventory
        table = inventory.table
        saved = job.look_away is not None
        if job.look_away is not None:
            job.look_away()
            self._saved.pop((job.slot, job.generation), None)
        else:
            self._leaving_bytes -= job.slot_bytes
        still = table.is_use(job.slot, job.generation)
        if not still or table.state[job.slot] != SlotState.COMMITTED:
            return
        if done.trouble is Trouble.CORRUPT:
            self._bad_slot(job.slot, now_s)
            return
        if saved:
            again = not stored and done.trouble is not Trouble.LOCKED
            if again and table.key[job.slot] is not None:
                self.saving.failed(job.slot, now_s)
            return
        table.unpin(job.slot)
        if table.key[job.slot] is None:
            if not table.pins[job.slot]:
                inventory.free(job.slot)
        elif stored and table.evictable(job.slot):
            inventory.evict(job.slot, "demoted", now_s)
        elif done.trouble is Trouble.LOCKED and table.evictable(job.slot):
            # as without an SSD: it would be the next to be tried, for ever
            inventory.evict(job.slot, "evicted", now_s)
