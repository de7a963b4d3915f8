"""Where records lie: segments that are appended to, their account, and which to clean.

Pure. Every byte of the capacity is free, used (live records), reserved (records being
written) or garbage (dead records, and each segment's own page):
``free + used + reserved + garbage == capacity``, always. ``free`` is negative only
where a directory holds more than its capacity is set to.
"""

from array import array
from dataclasses import dataclass, field

from kvtide.store.ssd.format import PAGE_BYTES

MIN_SEGMENTS = 16
MAX_SEGMENTS = 4096
MIN_SEGMENT_BYTES = 4 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SsdCounts:
    """Bytes. ``free + used + reserved + garbage == total``."""

    total: int
    free: int
    used: int
    reserved: int
    garbage: int


@dataclass(slots=True)
class Segment:
    """``tail`` is where the next record goes; ``rows`` are those appended, in order.

    ``uses`` are device operations under way that need the file.
    """

    number: int
    tail: int = PAGE_BYTES
    live: int = 0
    flying: int = 0
    uses: int = 0
    full: bool = False
    sealing: bool = False
    sealed: bool = False
    going: bool = False
    rows: "array[int]" = field(default_factory=lambda: array("I"))

    @property
    def ratio(self) -> float:
        """The share of its records that is live or about to be."""
        records = self.tail - PAGE_BYTES
        return (self.live + self.flying) / records if records else 0.0


class Segments:
    """See the module."""

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        """No segment yet; ``segment_bytes`` is halved or doubled to fit the capacity."""
        self.capacity_bytes = capacity_bytes
        size = segment_bytes
        while size > MIN_SEGMENT_BYTES and size * MIN_SEGMENTS > capacity_bytes:
            size //= 2
        while size * MAX_SEGMENTS < capacity_bytes:
            size *= 2
        self.segment_bytes = size
        self._all: dict[int, Segment] = {}
        self._open: Segment | None = None
        self._next = 1
        self._tails = self._used = self._reserved = 0
        # those that may have become empty since ``empties`` looked
        self._suspects: set[int] = set()

    # ---- what there is

    def counts(self) -> SsdCounts:
        """The exact account."""
        return SsdCounts(
            total=self.capacity_bytes,
            free=self.capacity_bytes - self._tails,
            used=self._used,
            reserved=self._reserved,
            garbage=self._tails - self._used - self._reserved,
        )

    @property
    def free_bytes(self) -> int:
        """What no segment has taken."""
        return self.capacity_bytes - self._tails

    @property
    def used_bytes(self) -> int:
        """Live records, and those about to be."""
        return self._used + self._reserved

    def __len__(self) -> int:
        """Segments."""
        return len(self._all)

    def get(self, number: int) -> Segment | None:
        """The segment with this number."""
        return self._all.get(number)

    # ---- records

    def room_for(self, length: int, keep_bytes: int) -> bool:
        """Whether a record fits with ``keep_bytes`` left free."""
        open_ = self._open
        own = 0 if open_ is not None and self._fits(open_, length) else PAGE_BYTES
        return self.free_bytes - own - length >= keep_bytes

    def append(self, length: int, row: int) -> Place:
        """A place for a record, in flight from now on. Ask ``room_for`` first."""
        open_ = self._open
        if open_ is not None and not self._fits(open_, length):
            self._fill(open_)
            open_ = None
        if open_ is None:
            open_ = self._open = Segment(self._next)
            self._all[open_.number] = open_
            self._next += 1
            self._tails += PAGE_BYTES
        place = Place(open_.number, open_.tail, length)
        open_.tail += length
        open_.flying += length
        open_.rows.append(row)
        self._tails += length
        self._reserved += length
        return place

    @property
    def all_sealed(self) -> bool:
        """Whether a scan will find all that it needs in heads alone."""
        return all(each.sealed or each.going for each in self._all.values())

    def close_open(self) -> None:
        """Append no more to the segment that is open: it is to be sealed."""
        open_, self._open = self._open, None
        if open_ is not None:
            self._fill(open_)

    def landed(self, place: Place, *, live: bool) -> None:
        """A record in flight is written, and counts; or it does not."""
        segment = self._all[place.segment]
        segment.flying -= place.length
        self._reserved -= place.length
        self._suspects.add(place.segment)
        if live:
            segment.live += place.length
            self._used += place.length

    def died(self, place: Place) -> None:
        """A live record is garbage now."""
        self._all[place.segment].live -= place.length
        self._used -= place.length
        self._suspects.add(place.segment)

    # ---- what a scan finds

    def found(self, number: int, tail: int) -> None:
        """A segment of an earlier life; its records follow as ``found_record``."""
        segment = Segment(number, tail=tail, full=True, sealed=True)
        self._all[number] = segment
        self._next = max(self._next, number + 1)
        self._tails += tail
        self._suspects.add(number)

    def found_record(self, place: Place, row: int) -> None:
        """A record of a segment that was found, and live."""
        segment = self._all[place.segment]
        segment.live += place.length
        segment.rows.append(row)
        self._used += place.length

    # ---- the end of segments

    def settle(self) -> tuple[list[Segment], list[Segment]]:
        """Full segments to drop, for nobody needs them; and those to seal.

        Each is told once, until ``not_dropped`` or ``not_sealed``.
        """
        suspects, self._suspects = self._suspects, set()
        drops: list[Segment] = []
        seals: list[Segment] = []
        for number in sorted(suspects):
            segment = self._all.get(number)
            if segment is None or not segment.full or segment.flying or segment.going:
                continue
            if not segment.live and not segment.uses:
                segment.going = True
                drops.append(segment)
            elif not segment.sealed and not segment.sealing:
                segment.sealing = True
                seals.append(segment)
        return drops, seals

    def sealed(self, number: int) -> None:
        """It is durable and complete."""
        self._all[number].sealing, self._all[number].sealed = False, True

    def not_sealed(self, number: int) -> None:
        """It could not be: try again."""
        self._all[number].sealing = False
        self._suspects.add(number)

    def begin_use(self, number: int) -> None:
        """A device operation needs the file until ``end_use``."""
        self._all[number].uses += 1

    def end_use(self, number: int) -> None:
        """It does not need it any more."""
        segment = self._all.get(number)
        if segment is not None:
            segment.uses -= 1
            self._suspects.add(number)

    def dropped(self, number: int) -> None:
        """A segment's file is gone."""
        segment = self._all.pop(number)
        self._tails -= segment.tail

    def not_dropped(self, number: int) -> None:
        """Its file could not be removed: try again."""
        self._all[number].going = False
        self._suspects.add(number)

    def dirtiest(self) -> Segment | None:
        """The sealed segment with the least live share that nobody writes or cleans."""
        best: Segment | None = None
        for segment in self._all.values():
            if segment.going or not segment.sealed or segment.flying:
                continue
            if best is None or segment.ratio < best.ratio:
                best = segment
        return best

    def _fill(self, segment: Segment) -> None:
        segment.full = True
        self._suspects.add(segment.number)

    def _fits(self, segment: Segment, length: int) -> bool:
        # a record larger than a segment gets one of its own
        empty = segment.tail == PAGE_BYTES
        return empty or segment.tail + length <= self.segment_bytes
