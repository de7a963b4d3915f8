"""Copies of blocks, in columns: each key's copies are one run of places.

A run has room for 1, 2, 4 … copies; when it is full its copies move to a run of twice
the size, and the old one is used again. So all copies of a whole prefix are gathered
without a step of Python for each.
"""

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.conductor.reducers.key_table import Rows

_LARGEST = 31
_GROWTH = 16
"""Places for single copies are made in advance: one for so many that there are."""


class CopyFields(NamedTuple):
    """One copy: the number of its store's life, its tier's, and its slot."""

    life: int
    tier: int
    arena: int
    offset: int
    length: int
    generation: int
    header_xxh3: int


class CopyTable:
    """Runs of copies by key row. Numbers must fit their columns."""

    def __init__(self) -> None:
        """Start empty."""
        self.life = array("H")
        self.tier = array("B")
        self._arena = array("H")
        self._offset = array("Q")
        self._length = array("Q")
        self.generation = array("Q")
        self._xxh3 = array("Q")
        self._start = array("i")
        self._size = array("i")
        self._class = array("B")
        self._free: list[array[int]] = [array("i") for _ in range(_LARGEST + 1)]

    def run(self, row: int) -> range:
        """The places of the copies of a key row; any row number is allowed."""
        if row >= len(self._start):
            return range(0)
        start = self._start[row]
        return range(start, start + self._size[row])

    def append(self, row: int, copy: CopyFields) -> None:
        """One more copy of this key.

        Raises:
            OverflowError: a number is none that a store could mean; nothing changed.
        """
        place = self._room(row)
        self._write(place, copy)
        self._size[row] += 1

    def replace(self, place: int, copy: CopyFields) -> None:
        """Another copy in this place.

        Raises:
            OverflowError: as ``append``.
        """
        before = self.at(place)
        try:
            self._write(place, copy)
        except OverflowError:
            self._write(place, before)
            raise

    def remove(self, row: int, place: int) -> int:
        """Take a copy out: the run's last takes its place. Returns how many are left."""
        last = self._start[row] + self._size[row] - 1
        for column in self._columns:
            column[place] = column[last]
        self._size[row] -= 1
        left = self._size[row]
        if left == 0:
            self._free[self._class[row]].append(self._start[row])
            self._start[row] = -1
        return left

    def at(self, place: int) -> CopyFields:
        """The copy in a place that is in use."""
        return CopyFields(
            self.life[place],
            self.tier[place],
            self._arena[place],
            self._offset[place],
            self._length[place],
            self.generation[place],
            self._xxh3[place],
        )

    def held(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of these rows have copies; any row number is allowed."""
        sizes = np.frombuffer(self._size, dtype=np.int32)
        found = np.zeros(len(rows), dtype=bool)
        known = rows < len(sizes)
        found[known] = sizes[rows[known]] > 0
        return found

    def places(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All copies of these rows (each 0 or greater): positions in ``rows``, places."""
        starts = np.frombuffer(self._start, dtype=np.int32).take(rows)
        sizes = np.frombuffer(self._size, dtype=np.int32).take(rows)
        ends = sizes.cumsum()
        which = np.arange(len(rows)).repeat(sizes)
        places = (starts - ends + sizes).repeat(sizes)
        places += np.arange(len(which))
        return which, places

    def lives_and_tiers(
        self, places: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """Life and tier numbers of the copies in these places."""
        lives = np.frombuffer(self.life, dtype=np.uint16)
        tiers = np.frombuffer(self.tier, dtype=np.uint8)
        return lives.take(places), tiers.take(places)

    @property
    def _columns(self) -> tuple["array[int]", ...]:
        return (
            self.life,
            self.tier,
            self._arena,
            self._offset,
            self._length,
            self.generation,
            self._xxh3,
        )

    def _write(self, place: int, copy: CopyFields) -> None:
        self.life[place] = copy.life
        self.tier[place] = copy.tier
        self._arena[place] = copy.arena
        self._offset[place] = copy.offset
        self._length[place] = copy.length
        self.generation[place] = copy.generation
        self._xxh3[place] = copy.header_xxh3

    def _room(self, row: int) -> int:
        """A place at the end of the row's run, which moves if it is full."""
        while row >= len(self._start):
            self._start.append(-1)
            self._size.append(0)
            self._class.append(0)
        size, start = self._size[row], self._start[row]
        if start < 0:
            self._class[row] = 0
            self._start[row] = start = self._take(0)
        elif size == 1 << self._class[row]:
            larger = self._take(self._class[row] + 1)
            for column in self._columns:
                column[larger : larger + size] = column[start : start + size]
            self._free[self._class[row]].append(start)
            self._class[row] += 1
            self._start[row] = start = larger
        return start + size

    def _take(self, size_class: int) -> int:
        free = self._free[size_class]
        if free:
            return free.pop()
        start = len(self.life)
        more = 0 if size_class else start // _GROWTH
        for column in self._columns:
            column.frombytes(bytes(column.itemsize * ((1 << size_class) + more)))
        free.extend(range(start + more, start, -1))
        return start
