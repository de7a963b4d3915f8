"""Ranges of the arena that are cut into slots of one size.

A size class gets slabs as it needs them; a slab of which no slot is in use may go
back, so that several models share one arena and none starves the others for ever.

Shared memory is promised more than once, and whoever writes where none is left is
killed. So the arena is asked for memory slab by slab, and a slab never reaches beyond
what has memory. A refusal stands until ``back_again``. What is in no slab may lose its
memory again, when the host needs it.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtide.store.extents import Extents

SLOT_ALIGN_BYTES = 64
MAX_SLAB_SLOTS = 64
PAGE_BYTES = 4096


Back = Callable[[int, int], bool]
"""Whether there is memory behind (offset, length) of the arena from now on."""


def always_backed(offset: int, length: int) -> bool:
    """For an arena that is not shared with others."""
    del offset, length
    return True


GiveBack = Callable[[int, int], None]
"""Take the memory behind (offset, length) of the arena away; nobody uses it."""


def nothing_given_back(offset: int, length: int) -> None:
    """For an arena whose memory is its own."""
    del offset, length


LookAway = Callable[[], None]
"""Nobody reads there any more; to be called once."""


@dataclass(slots=True)
class SizeClass:
    """Slots of one size. ``free`` is oldest first: the longest unused goes out next."""

    number: int
    slot_bytes: int
    stride: int
    free: deque[int] = field(default_factory=deque[int])


@dataclass(slots=True)
class Slab:
    """``count`` slots from number ``first``, at ``offset`` of the arena.

    ``busy`` of them are in use; ``looks`` are threads that read from it.
    """

    first: int
    count: int
    offset: int
    size_class: SizeClass
    busy: int = 0
    looks: int = 0

    @property
    def length(self) -> int:
        """Bytes."""
        return self.count * self.size_class.stride

    def slots(self) -> range:
        """The numbers of its slots."""
        return range(self.first, self.first + self.count)

    def slot_offset(self, slot: int) -> int:
        """Where a slot starts in the arena."""
        return self.offset + (slot - self.first) * self.size_class.stride


class Slabs:
    """Which part of the arena belongs to which size class."""

    def __init__(
        self, arena_bytes: int, slab_bytes: int, back: Back, give_back: GiveBack
    ) -> None:
        """No slabs yet. ``slab_bytes`` is what a slab aims at."""
        self.arena_bytes = arena_bytes
        self.limit_bytes = arena_bytes
        self._slab_bytes = slab_bytes
        self._back = back
        self._give_back = give_back
        self._refused = False
        self._free = Extents(arena_bytes)
        # those without memory behind them; all of them are free
        self._bare = Extents(arena_bytes)
        self._numbers = Extents(0)
        self._offsets: list[int] = []
        self._slabs: list[Slab] = []
        self._idle: dict[int, Slab] = {}
        self.busy_bytes = 0

    @property
    def slot_numbers(self) -> int:
        """How many slot numbers were ever needed at once; columns are this long."""
        return self._numbers.length

    @property
    def backed_bytes(self) -> int:
        """How much of the arena has memory behind it."""
        return self.arena_bytes - self._bare.free

    def __iter__(self) -> Iterator[Slab]:
        """All slabs by offset."""
        return iter(self._slabs)

    def usable(self, start: int, end: int) -> bool:
        """Whether ``[start, end)`` has memory behind it, or may have."""
        more = sum(length for _, length in self._bare.within(start, end))
        return more == 0 or (
            not self._refused and self.backed_bytes + more <= self.limit_bytes
        )

    @property
    def end(self) -> int:
        """How far slabs may reach at present."""
        ranges = list(self._bare)
        if not ranges or sum(ranges[-1]) < self.arena_bytes:
            return self.arena_bytes
        start, length = ranges[-1]
        more = 0 if self._refused else max(0, self.limit_bytes - self.backed_bytes)
        return start + min(length, more)

    def back_again(self) -> None:
        """Some memory may be there again: the next slab may ask for it."""
        self._refused = False

    def make(self, size_class: SizeClass) -> Slab | None:
        """A new slab out of free bytes; smaller than usual when little is left."""
        stride = size_class.stride
        count = max(1, min(MAX_SLAB_SLOTS, self._slab_bytes // stride))
        offset = self._place(count * stride)
        if offset is None:
            count = min(count, self._largest() // stride)
            offset = self._place(count * stride) if count else None
        if offset is None:
            return None
        first = self._numbers.take_or_grow(count)
        slab = Slab(first, count, offset, size_class)
        i = bisect_left(self._offsets, offset)
        self._offsets.insert(i, offset)
        self._slabs.insert(i, slab)
        self._idle[slab.first] = slab
        size_class.free.extend(slab.slots())
        return slab

    def _place(self, length: int) -> int | None:
        """Take free bytes with memory behind them; ask for memory if there are none."""
        ranges = self._free.without(self._bare)
        start = next((low for low, have in ranges if have >= length), None)
        if start is None:
            start = self._free.fit(length)
            if start is None or not self._have_memory(start, start + length):
                return None
        self._free.cut(start, length)
        return start

    def _have_memory(self, start: int, end: int) -> bool:
        # memory comes and goes in whole pages
        start -= start % PAGE_BYTES
        end = min(self.arena_bytes, -(-end // PAGE_BYTES) * PAGE_BYTES)
        if not self.usable(start, end):
            return False
        for low, length in self._bare.within(start, end):
            if not self._back(low, length):
                self._refused = True
                return False
            self._bare.cut(low, length)
        return True

    def _largest(self) -> int:
        """The longest piece that a slab can have."""
        with_memory = self._free.without(self._bare)
        largest = max((length for _, length in with_memory), default=0)
        if self._refused:
            return largest
        more = max(0, self.limit_bytes - self.backed_bytes)
        for start, length in self._free:
            bare = sum(have for _, have in self._bare.within(start, start + length))
            largest = max(largest, length - max(0, bare - more))
        return largest

    def unmake(self, slab: Slab) -> None:
        """Give the bytes and numbers of an idle slab back."""
        i = bisect_left(self._offsets, slab.offset)
        del self._offsets[i], self._slabs[i]
        del self._idle[slab.first]
        own = slab.slots()
        free = slab.size_class.free
        slab.size_class.free = deque(slot for slot in free if slot not in own)
        self._free.give(slab.offset, slab.length)
        self._numbers.give(slab.first, slab.count)

    def return_memory(self, wanted_bytes: int) -> None:
        """Have about that much less memory behind bytes that are in no slab."""
        for start, length in list(self._free.without(self._bare)):
            first = -(-start // PAGE_BYTES) * PAGE_BYTES
            last = min(
                start + length, first + -(-wanted_bytes // PAGE_BYTES) * PAGE_BYTES
            )
            last -= last % PAGE_BYTES
            if first >= last:
                continue
            self._give_back(first, last - first)
            self._bare.give(first, last - first)
            wanted_bytes -= last - first
            if wanted_bytes <= 0:
                return

    def idle(self) -> Slab | None:
        """A slab with no slot in use, from which nobody reads."""
        return next(iter(self._idle.values()), None)

    def idle_of_others(self, size_class: SizeClass) -> Slab | None:
        """A slab of another class with no slot in use."""
        for slab in self._idle.values():
            if slab.size_class is not size_class:
                return slab
        return None

    def at(self, offset: int) -> Slab | None:
        """The slab that a byte of the arena belongs to."""
        i = bisect_right(self._offsets, offset) - 1
        if i < 0 or offset >= self._slabs[i].offset + self._slabs[i].length:
            return None
        return self._slabs[i]

    def count_busy(self, slab: Slab, change: int) -> None:
        """A slot of the slab came into use (1) or went out of it (-1)."""
        slab.busy += change
        self.busy_bytes += change * slab.size_class.slot_bytes
        self._sort(slab)

    def look(self, slab: Slab) -> LookAway:
        """A thread reads from the slab, until that is called."""
        slab.looks += 1
        self._sort(slab)

        def away() -> None:
            slab.looks -= 1
            self._sort(slab)

        return away

    def _sort(self, slab: Slab) -> None:
        if slab.busy == 0 and slab.looks == 0:
            self._idle[slab.first] = slab
        else:
            self._idle.pop(slab.first, None)
