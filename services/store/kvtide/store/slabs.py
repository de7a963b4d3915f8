"""Ranges of the arena that are cut into slots of one size.

A size class gets slabs as it needs them; a slab of which no slot is in use may go
back, so that several models share one arena and none starves the others for ever.

Shared memory is promised more than once, and whoever writes where none is left is
killed. So the arena is asked to back its bytes from the start on, slab by slab, and a
slab never reaches beyond what it has backed. A refusal stands until ``back_again``.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtide.store.extents import Extents

SLOT_ALIGN_BYTES = 64
MAX_SLAB_SLOTS = 64


Back = Callable[[int, int], bool]
"""Whether there is memory behind (offset, length) of the arena from now on."""


def always_backed(offset: int, length: int) -> bool:
    """For an arena that is not shared with others."""
    del offset, length
    return True


@dataclass(slots=True)
class SizeClass:
    """Slots of one size. ``free`` is oldest first: the longest unused goes out next."""

    number: int
    slot_bytes: int
    stride: int
    free: deque[int] = field(default_factory=deque[int])


@dataclass(slots=True)
class Slab:
    """``count`` slots from number ``first``, at ``offset`` of the arena."""

    first: int
    count: int
    offset: int
    size_class: SizeClass
    busy: int = 0

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

    def __init__(self, arena_bytes: int, slab_bytes: int, back: Back) -> None:
        """No slabs yet. ``slab_bytes`` is what a slab aims at."""
        self.arena_bytes = arena_bytes
        self._slab_bytes = slab_bytes
        self._back = back
        self._refused = False
        # those with memory behind them
        self._bytes = Extents(0)
        self._numbers = Extents(0)
        self._offsets: list[int] = []
        self._slabs: list[Slab] = []
        self._idle: dict[int, Slab] = {}

    @property
    def slot_numbers(self) -> int:
        """How many slot numbers were ever needed at once; columns are this long."""
        return self._numbers.length

    def __iter__(self) -> Iterator[Slab]:
        """All slabs by offset."""
        return iter(self._slabs)

    @property
    def end(self) -> int:
        """How far slabs may reach at present."""
        return self._bytes.length if self._refused else self.arena_bytes

    def back_again(self) -> None:
        """Some memory may be there again: the next slab may ask for it."""
        self._refused = False

    def make(self, size_class: SizeClass) -> Slab | None:
        """A new slab out of free bytes; smaller than usual when little is left."""
        wanted = max(1, min(MAX_SLAB_SLOTS, self._slab_bytes // size_class.stride))
        if self._bytes.largest < wanted * size_class.stride:
            self._lengthen(wanted * size_class.stride)
        count = min(wanted, self._bytes.largest // size_class.stride)
        if count < 1:
            return None
        offset = self._bytes.take(count * size_class.stride)
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

    def _lengthen(self, wanted: int) -> None:
        """Have memory behind more of the arena, for ``wanted`` bytes in one piece."""
        bounds = self._bytes
        end = min(self.arena_bytes, bounds.length - bounds.tail + wanted)
        if self._refused or end <= bounds.length:
            return
        if self._back(bounds.length, end - bounds.length):
            bounds.grow(end - bounds.length)
        else:
            self._refused = True

    def unmake(self, slab: Slab) -> None:
        """Give the bytes and numbers of an idle slab back."""
        i = bisect_left(self._offsets, slab.offset)
        del self._offsets[i], self._slabs[i]
        del self._idle[slab.first]
        own = slab.slots()
        free = slab.size_class.free
        slab.size_class.free = deque(slot for slot in free if slot not in own)
        self._bytes.give(slab.offset, slab.length)
        self._numbers.give(slab.first, slab.count)

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
        if slab.busy == 0:
            self._idle[slab.first] = slab
        else:
            self._idle.pop(slab.first, None)
