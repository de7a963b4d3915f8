"""Segments are cleaned: their live records move to the open one, and the file goes.

Pure. One segment at a time, the one with the least live share. Moved records are
verified as they are read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtide.store.ssd.books import Books
from kvtide.store.ssd.entries import RowState
from kvtide.store.ssd.events import MoveRecord, RecordDone, Trouble
from kvtide.store.ssd.segments import Place, Segment

USELESS_RATIO = 0.9
_UNUSABLE = (Trouble.CORRUPT, Trouble.UNREADABLE, Trouble.LOCKED)


@dataclass(slots=True)
class _Moved:
    """A record on its way."""

    era: int
    row: int
    generation: int
    source: Place
    place: Place
    lsn: int


class Cleaning:
    """See the module."""

    def __init__(self, books: Books) -> None:
        """Nothing is being cleaned."""
        self._books = books
        self._under_way: dict[int, _Moved] = {}
        self._rows: Iterator[int] = iter(())
        self._next: int | None = None
        self._segment = 0
        self._looked = (0, 0)

    def __len__(self) -> int:
        """Moves under way."""
        return len(self._under_way)

    def forget(self) -> None:
        """All segments are forgotten: what is under way ends for nothing."""
        self._rows, self._next = iter(()), None

    # ---- what goes

    def evict(self, now_s: float) -> None:
        """Drop the coldest blocks while more than the upper watermark is used."""
        books, rules = self._books, self._books.rules
        segments = books.segments
        if segments.used_bytes <= rules.ssd_high * segments.capacity_bytes:
            return
        excess = segments.used_bytes - rules.ssd_low * segments.capacity_bytes
        while excess > 0 and (row := books.entries.coldest()) is not None:
            excess -= books.entries.place(row).length
            self._evict(row, now_s)

    def evict_coldest(self, count: int, now_s: float) -> None:
        """Drop so many blocks, so that there is something to clean."""
        for _ in range(count):
            row = self._books.entries.coldest()
            if row is not None:
                self._evict(row, now_s)

    def _evict(self, row: int, now_s: float) -> None:
        self._books.drop(row, "evicted", now_s)
        self._books.tally.ssd_evicted += 1

    def shrink(self, now_s: float) -> None:
        """The file system is full: drop the blocks of a segment or two, unread.

        There is no room to move them to.
        """
        books, segments = self._books, self._books.segments
        segments.capacity_bytes -= max(0, segments.free_bytes)
        worst = segments.dirtiest()
        if worst is None:
            return
        for row in self._live_rows(worst):
            books.drop(row, "no_space", now_s)
            books.tally.ssd_evicted += 1

    # ---- what moves

    def next_length(self) -> int | None:
        """How long the record will be that should move next; None: nothing should."""
        row = self._peek()
        if row is None:
            self._pick()
            row = self._peek()
        return None if row is None else self._moved_bytes(row)

    def start(self) -> MoveRecord:
        """Move the record that ``next_length`` was of; there is room for it."""
        books = self._books
        row, self._next = self._next, None
        assert row is not None  # noqa: S101 - next_length said so
        entries = books.entries
        source = entries.place(row)
        place = books.segments.append(self._moved_bytes(row), row)
        books.segments.begin_use(source.segment)
        lsn, number = books.next_lsn(), books.next_number()
        self._under_way[number] = _Moved(
            books.era, row, entries.generation[row], source, place, lsn
        )
        return MoveRecord(
            number, source, entries.lsn(row), place, lsn, books.wanted(row)
        )

    def done(
        self,
        done: RecordDone,
        unreadable: Callable[[int, RecordDone], None],
    ) -> bool:
        """A move ended; false: it is none of these.

        ``unreadable`` gets the row of a record that could not be read or is corrupt.
        """
        job = self._under_way.pop(done.number, None)
        if job is None:
            return False
        books = self._books
        if job.era != books.era:
            return True
        here = books.entries.is_use(job.row, job.generation)
        segments = books.segments
        segments.landed(job.place, live=done.trouble is None and here)
        segments.end_use(job.source.segment)
        books.tally.ssd_compacted_bytes += job.place.length
        if done.trouble is None and here:
            segments.died(job.source)
            books.entries.move(job.row, job.place, job.lsn)
        elif here and done.trouble in _UNUSABLE:
            unreadable(job.row, done)
        return True

    # ---- inside

    def _moved_bytes(self, row: int) -> int:
        """A record that was not sealed before may be longer once it is."""
        books = self._books
        return books.rules.record_bytes(books.space(row).slot_bytes)

    def _peek(self) -> int | None:
        if self._next is None:
            self._next = next(self._rows, None)
        while self._next is not None and not self._lies_in(self._next, self._segment):
            self._next = next(self._rows, None)
        return self._next

    def _lies_in(self, row: int, segment: int) -> bool:
        entries = self._books.entries
        live = entries.state[row] == RowState.LIVE
        return live and entries.place(row).segment == segment

    def _live_rows(self, segment: Segment) -> list[int]:
        rows = dict.fromkeys(segment.rows)
        return [row for row in rows if self._lies_in(row, segment.number)]

    def _pick(self) -> None:
        segments = self._books.segments
        looked = (segments.counts().garbage, len(segments))
        if self._under_way or looked == self._looked:
            return
        worst = segments.dirtiest()
        if worst is None:
            return
        short = segments.free_bytes < 2 * segments.segment_bytes
        limit = USELESS_RATIO if short else self._books.rules.clean_below
        if worst.ratio < limit:
            self._segment = worst.number
            self._rows = iter(self._live_rows(worst))
        else:
            self._looked = looked
