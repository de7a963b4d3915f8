"""The SSD tier's decisions: what is demoted, staged, moved and dropped, and when. Pure.

A part of the store's machine, which gives it what happens and passes on what it wants
done. ``work`` is asked after each event.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

from kvtide.bus.messages import StageBlocks
from kvtide.kv import BlockKey, Located
from kvtide.store.events import BlockRow, Reply
from kvtide.store.inventory import Inventory
from kvtide.store.leases import Held
from kvtide.store.ssd.books import Books
from kvtide.store.ssd.budget import WriteBudget
from kvtide.store.ssd.cleaning import Cleaning
from kvtide.store.ssd.deletions import Deletions
from kvtide.store.ssd.demotion import BadSlot, Demotion
from kvtide.store.ssd.entries import RowState
from kvtide.store.ssd.events import (
    CloseTier,
    DeletedSpace,
    DropSegment,
    Found,
    KillRecord,
    NoteDeleted,
    NoteRemoved,
    OpenTier,
    RecordDone,
    SealSegment,
    SegmentDone,
    SsdCommand,
    SsdEvent,
    TierFailed,
    TierOpened,
    Tombstone,
    Trouble,
)
from kvtide.store.ssd.health import TierHealth, TierState
from kvtide.store.ssd.rules import SsdRules
from kvtide.store.ssd.staging import Staging
from kvtide.store.tally import Tally

TierCommands = list[Reply | SsdCommand]
ROWS_PAGE = 1000
EVICT_SHARE = 64
UNNOTED = 1000


class SsdTier:
    """See the module."""

    def __init__(
        self, inventory: Inventory, tally: Tally, rules: SsdRules, bad_slot: BadSlot
    ) -> None:
        """Nothing is opened before the first ``work``."""
        self.rules = rules
        self.books = Books(inventory, tally, rules)
        self.health = TierHealth(rules)
        self.demotion = Demotion(self.books, bad_slot)
        self.cleaning = Cleaning(self.books)
        self.staging = Staging(self.books)
        burst = rules.write_bytes_per_s * rules.write_burst_s
        self._budget = WriteBudget(rules.write_bytes_per_s, burst)
        self._deletions = Deletions()
        self._unnoted_keys: list[NoteRemoved] = []
        self._unnoted: dict[tuple[bytes | None, bytes | None], NoteDeleted] = {}
        self._write_due_s: float | None = None
        self._wrote_s = float("-inf")

    def wake_at_s(self) -> float | None:
        """When ``work`` has something to do without an event."""
        due = (
            self.health.retry_at_s,
            self._write_due_s,
            self.staging.first_due_s,
        )
        return min((at_s for at_s in due if at_s is not None), default=None)

    # ---- what happens

    def handle(self, event: SsdEvent, now_s: float) -> TierCommands:
        """An operation of the device ended, or something was found."""
        commands: TierCommands = []
        was = self.health.state
        match event:
            case Found():
                self._found(event, now_s)
            case TierOpened():
                self.health.opened()
                # what was deleted while the directory was shut, or being read
                commands += self._unnoted.values()
                commands += self._unnoted_keys
                self._unnoted, self._unnoted_keys = {}, []
            case TierFailed(reason):
                self.health.out(reason, now_s)
            case RecordDone():
                commands += self._record_done(event, now_s)
            case SegmentDone():
                self._segment_done(event, now_s)
            case _:
                assert_never(event)
        if self.health.state is TierState.OUT and was is not TierState.OUT:
            self.books.clear("tier_out", now_s)
            self.cleaning.forget()
            commands.append(CloseTier())
        return commands

    def work(self, now_s: float) -> TierCommands:
        """What is to be done now."""
        commands: TierCommands = [*self.staging.expire(now_s)]
        health = self.health
        self._write_due_s = None
        if health.open_now(now_s):
            commands.append(OpenTier())
        if health.write_now(now_s):
            self.books.segments.capacity_bytes = self.rules.capacity_bytes
        if not health.readable:
            return commands
        if health.writable:
            self.cleaning.evict(now_s)
            commands += self._write(now_s)
            if self.demotion.saving.flushing and not len(self.demotion):
                self.books.segments.close_open()
        drops, seals = self.books.segments.settle()
        commands += [DropSegment(segment.number) for segment in drops]
        commands += [SealSegment(each.number, each.tail) for each in seals]
        return commands

    def flush(self, now_s: float) -> None:
        """The store ends: what DRAM alone has is written as fast as can be."""
        self.demotion.saving.flush(now_s)

    @property
    def unsaved(self) -> int:
        """How many blocks DRAM alone has, about."""
        return len(self.demotion.saving)

    @property
    def flushed(self) -> bool:
        """Whether all of that is done that can be."""
        saving = self.demotion.saving
        if not (saving.flushing and self.health.writable):
            return True
        first = saving.next_slot()
        left = first is not None and saving.has_room(first[0])
        return not left and not len(self.demotion) and self.books.segments.all_sealed

    def stage(
        self, held: Held, message: StageBlocks, token: int | None, now_s: float
    ) -> TierCommands:
        """Bring blocks into DRAM for a reader; see ``Staging``."""
        return [*self.staging.stage(held, message, token, now_s)]

    def expect(self, slot_bytes: int, blocks: int) -> None:
        """Somebody asked for slots: so much room should be there for the next, too."""
        self.books.slot_bytes = slot_bytes
        self.demotion.expect(slot_bytes * blocks)

    def warm(self, keys: Sequence[BlockKey]) -> None:
        """Blocks are about to be read: the chain's head ends as the most recent."""
        entries = self.books.entries
        for key in reversed(keys):
            row = entries.find(key)
            if row is not None:
                entries.touch(row)

    def delete(self, deleted: DeletedSpace, now_s: float) -> TierCommands:
        """Drop all blocks that it covers; those on disk stay deleted in later lives."""
        books = self.books
        spaces = books.inventory.spaces
        entries = books.entries

        def covers(row: int) -> bool:
            return deleted.covers(spaces[entries.space(row)].tags)

        self.demotion.delete(covers)
        self.staging.delete(lambda _, tags: deleted.covers(tags))
        for row, state in enumerate(entries.state):
            if state == RowState.LIVE and covers(row):
                books.drop(row, "deleted", now_s)
        self._deletions.add(deleted)
        if not self.rules.capacity_bytes:
            return []
        note = NoteDeleted(deleted)
        if not self.health.readable:
            self._unnoted[deleted.tenant, deleted.model] = note
            return []
        return [note]

    def remove(
        self, keys: Sequence[BlockKey], until_ms: int, now_s: float
    ) -> TierCommands:
        """Drop single blocks; what is on disk of them stays away in later lives."""
        books, gone = self.books, set(keys)
        entries = books.entries
        self.demotion.delete(lambda row: entries.key(row) in gone)
        self.staging.delete(lambda key, _: key in gone)
        for key in keys:
            row = entries.find(key)
            if row is not None:
                books.drop(row, "removed", now_s)
        for key in keys:
            self._deletions.add_key(key, until_ms)
        if not self.rules.capacity_bytes or not keys:
            return []
        note = NoteRemoved(tuple(keys), until_ms)
        if not self.health.readable:
            self._unnoted_keys = [*self._unnoted_keys, note][-UNNOTED:]
            return []
        return [note]

    # ---- looking

    def was_told(self, deleted: Tombstone) -> bool:
        """Whether this life has carried out that deletion, or the same later."""
        return self._deletions.has(deleted)

    def find(self, key: BlockKey) -> Located | None:
        """The descriptor of a key's copy on the SSD."""
        return self.books.find(key)

    def page(self, after: BlockKey | None, limit: int) -> list[Located]:
        """At most ``limit`` copies with keys above ``after``, ascending."""
        keys = self.books.entries.index.page(after, limit)
        found = (self.books.find(key) for key in keys)
        return [located for located in found if located is not None]

    def rows(self) -> Iterator[BlockRow]:
        """The whole state by key; each row is true when it is taken."""
        after: BlockKey | None = None
        while keys := self.books.entries.index.page(after, ROWS_PAGE):
            after = keys[-1]
            for key in keys:
                row = self.books.entries.find(key)
                if row is not None:
                    yield self.books.row(row)

    # ---- inside

    def _found(self, found: Found, now_s: float) -> None:
        if self.health.state is not TierState.OPENING:
            return
        if found.tail:
            self.books.segments.found(found.segment, found.tail)
        for record in found.records:
            if not self._deletions.cover(record.key, record.tags, record.written_ms):
                self.books.find_record(record, now_s)

    def _record_done(self, done: RecordDone, now_s: float) -> TierCommands:
        killed: TierCommands = []

        def unreadable(row: int | None, done: RecordDone) -> None:
            entries = self.books.entries
            if row is not None and done.trouble is Trouble.CORRUPT:
                place, lsn = entries.place(row), entries.lsn(row)
                killed.append(KillRecord(place, lsn))
            self._unreadable(row, done, now_s)

        replies = self.staging.done(done, unreadable, now_s)
        if replies is not None:
            if done.trouble is None:
                self.health.read_well()
            return [*replies, *killed]
        if not self.demotion.done(done, now_s):
            self.cleaning.done(done, unreadable)
        killed += self.demotion.void
        self.demotion.void = []
        if not self.books.is_current(done.number):
            return killed
        if done.trouble in (Trouble.UNWRITABLE, Trouble.FULL):
            self.books.tally.ssd_write_errors += 1
            self.health.writes_out(done.reason, now_s)
            if done.trouble is Trouble.FULL:
                self.cleaning.shrink(now_s)
        elif done.trouble is Trouble.GONE:
            self.health.out(done.reason, now_s)
        return killed

    def _unreadable(self, row: int | None, done: RecordDone, now_s: float) -> None:
        if not self.books.is_current(done.number):
            return
        tally = self.books.tally
        corrupt = done.trouble is Trouble.CORRUPT
        if done.trouble is Trouble.LOCKED:
            if row is not None:
                self.books.drop(row, "locked", now_s)
            return
        if corrupt:
            tally.ssd_corrupt += 1
        else:
            tally.ssd_read_errors += 1
        if row is not None:
            reason = "corrupt" if corrupt else "unreadable"
            self.books.drop(row, reason, now_s)
        if done.trouble is Trouble.GONE:
            self.health.out(done.reason, now_s)
        elif not corrupt:
            self.health.read_failed(done.reason, now_s)

    def _segment_done(self, done: SegmentDone, now_s: float) -> None:
        segments = self.books.segments
        if segments.get(done.segment) is None:
            return
        if done.trouble is None and done.dropped:
            segments.dropped(done.segment)
        elif done.trouble is None:
            segments.sealed(done.segment)
        elif done.dropped:
            segments.not_dropped(done.segment)
        else:
            segments.not_sealed(done.segment)
        if done.trouble is Trouble.GONE:
            self.health.out(done.reason, now_s)
        elif done.trouble is not None:
            self.health.writes_out(done.reason, now_s)

    # ---- writing

    def _write(self, now_s: float) -> TierCommands:
        commands: TierCommands = []
        while len(self.demotion) + len(self.cleaning) < self.rules.writes:
            held_up_s = self._wrote_s + self.rules.write_wait_s
            if len(self.staging) and now_s < held_up_s:
                # reads go first, but a write is not put off for ever
                self._due(held_up_s)
                break
            started = self._next_write(now_s)
            if started is None:
                break
            commands.append(started)
            self._wrote_s = now_s
        return commands

    def _next_write(self, now_s: float) -> SsdCommand | None:
        segments = self.books.segments
        short = segments.free_bytes < 2 * segments.segment_bytes
        demote = self.demotion.wanted()
        if short or not demote:
            length = self.cleaning.next_length()
            if length is not None and segments.room_for(length, 0):
                if not self._spend(length, now_s):
                    return None
                return self.cleaning.start()
        started = self._demote(now_s) if demote else None
        return started or self._save(now_s)

    def _demote(self, now_s: float) -> SsdCommand | None:
        segments, table = self.books.segments, self.books.inventory.table
        while self.demotion.wanted():
            victims = self.demotion.victims()
            if not victims:
                return None
            for slot in victims:
                clean = self.demotion.drop_clean(slot, now_s)
                if clean or self.demotion.takes_over(slot):
                    continue
                length = self.rules.record_bytes(table.slot_bytes(slot))
                if not segments.room_for(length, segments.segment_bytes):
                    if not len(self.cleaning):
                        count = 1 + len(self.books.entries) // EVICT_SHARE
                        self.cleaning.evict_coldest(count, now_s)
                    return None
                if not self._spend(length, now_s):
                    return None
                return self.demotion.start(slot)
        return None

    def _save(self, now_s: float) -> SsdCommand | None:
        saving = self.demotion.saving
        first = saving.next_slot()
        if first is None or not saving.has_room(first[0]):
            return None
        slot, due_s = first
        if due_s > now_s:
            self._due(due_s)
            return None
        length = self.rules.record_bytes(self.books.inventory.table.slot_bytes(slot))
        if not self._spend(length, now_s):
            return None
        return self.demotion.start(slot, stays=True)

    def _spend(self, length: int, now_s: float) -> bool:
        if self.demotion.saving.flushing or self._budget.take(length, now_s):
            return True
        self._due(self._budget.due_s(length, now_s))
        return False

    def _due(self, at_s: float) -> None:
        due_s = self._write_due_s
        self._write_due_s = at_s if due_s is None else min(due_s, at_s)
