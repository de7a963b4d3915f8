"""Rows by block key, in columns: no object for each key.

Open addressing with linear probing over an ``int32`` table; a row holds the key as two
64-bit numbers. Rows that were freed are given out again first.
"""

import struct
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtide.kv import KEY_BYTES, BlockKey

Rows = NDArray[np.int32]

EMPTY = -1
_DELETED = -2
_PAIR = struct.Struct("<QQ")
_MASK_64 = (1 << 64) - 1
_MIX_HIGH = 0x9E3779B97F4A7C15
_MIX_LOW = 0xC2B2AE3D27D4EB4F
_LEAST_BITS = 10
_FULL = 0.6
"""Share of the table that may be in use before it is made anew, deleted ones included."""


class KeyTable:
    """A set of keys, each with a row number that stays while the key does."""

    def __init__(self) -> None:
        """Start empty."""
        self._high = array("Q")
        self._low = array("Q")
        self._free = array("i")
        self._count = 0
        self._used = 0
        self._shift = 64 - _LEAST_BITS
        self._table = array("i", [EMPTY]) * (1 << _LEAST_BITS)

    def __len__(self) -> int:
        """Keys in the table."""
        return self._count

    @property
    def rows(self) -> int:
        """Row numbers that were ever given out are below this."""
        return len(self._high)

    def find(self, key: BlockKey) -> int:
        """The key's row, or ``EMPTY``."""
        if len(key) != KEY_BYTES:
            return EMPTY
        high, low = _PAIR.unpack(key)
        return self._table[self._slot(high, low)] if self._count else EMPTY

    def find_first(self, keys: Sequence[BlockKey]) -> list[int]:
        """The rows of the first keys, up to the first that isn't there; for a few keys."""
        found: list[int] = []
        if not self._count:
            return found
        table, highs, lows = self._table, self._high, self._low
        mask, shift, unpack = len(table) - 1, self._shift, _PAIR.unpack
        for key in keys:
            if len(key) != KEY_BYTES:
                break
            high, low = unpack(key)
            slot: int = ((high * _MIX_HIGH + low * _MIX_LOW) & _MASK_64) >> shift
            while (row := table[slot]) != EMPTY:
                if row >= 0 and lows[row] == low and highs[row] == high:
                    break
                slot = (slot + 1) & mask
            if row == EMPTY:
                break
            found.append(row)
        return found

    def find_all(self, keys: Sequence[BlockKey]) -> Rows:
        """The row of each key, or ``EMPTY``; for many keys at once."""
        pairs = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)
        high, low = pairs[:, 0], pairs[:, 1]
        table = np.frombuffer(self._table, dtype=np.int32)
        highs, lows = self._numbers()
        found = np.full(len(keys), EMPTY, dtype=np.int32)
        if self._count == 0:
            return found
        open_ = np.arange(len(keys))
        slots = self._homes(high, low)
        while open_.size:
            rows = table[slots]
            safe = np.maximum(rows, 0)
            hit = (
                (rows >= 0) & (highs[safe] == high[open_]) & (lows[safe] == low[open_])
            )
            found[open_[hit]] = rows[hit]
            go_on = ~hit & (rows != EMPTY)
            open_ = open_[go_on]
            slots = (slots[go_on] + 1) & (table.size - 1)
        return found

    def add(self, key: BlockKey) -> int:
        """The key's row, a new one if it had none; ``key`` has ``KEY_BYTES`` bytes."""
        high, low = _PAIR.unpack(key)
        slot = self._slot(high, low)
        row = self._table[slot]
        if row >= 0:
            return row
        if self._used + 1 > _FULL * len(self._table):
            self._remake()
            slot = self._slot(high, low)
        row = self._row(high, low)
        self._table[slot] = row
        self._used += 1
        self._count += 1
        return row

    def remove(self, row: int) -> None:
        """Take the key of ``row`` out; the row may be given to another key."""
        slot = self._slot(self._high[row], self._low[row])
        self._table[slot] = _DELETED
        self._free.append(row)
        self._count -= 1

    def key_of(self, row: int) -> BlockKey:
        """The key in a row that is in use."""
        return BlockKey(_PAIR.pack(self._high[row], self._low[row]))

    def _row(self, high: int, low: int) -> int:
        if self._free:
            row = self._free.pop()
            self._high[row], self._low[row] = high, low
            return row
        self._high.append(high)
        self._low.append(low)
        return len(self._high) - 1

    def _slot(self, high: int, low: int) -> int:
        """Where the key is in the table, or the empty place at the end of its probes."""
        table, highs, lows = self._table, self._high, self._low
        mask = len(table) - 1
        slot = ((high * _MIX_HIGH + low * _MIX_LOW) & _MASK_64) >> self._shift
        while (row := table[slot]) != EMPTY:
            if row >= 0 and lows[row] == low and highs[row] == high:
                break
            slot = (slot + 1) & mask
        return slot

    def _numbers(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Views of the rows; the caller must let go of them before a row is added."""
        return (
            np.frombuffer(self._high, dtype=np.uint64),
            np.frombuffer(self._low, dtype=np.uint64),
        )

    def _homes(
        self, high: NDArray[np.uint64], low: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        mixed = high * np.uint64(_MIX_HIGH) + low * np.uint64(_MIX_LOW)
        return (mixed >> np.uint64(self._shift)).astype(np.int64)

    def _remake(self) -> None:
        """A table with room for twice the keys, and without deleted places."""
        bits = _LEAST_BITS
        while (1 << bits) * _FULL < 2 * (self._count + 1):
            bits += 1
        used = np.ones(self.rows, dtype=bool)
        used[np.frombuffer(self._free, dtype=np.int32)] = False
        left = np.flatnonzero(used).astype(np.int32)
        self._shift = 64 - bits
        table = array("i", [EMPTY]) * (1 << bits)
        view = np.frombuffer(table, dtype=np.int32)
        highs, lows = self._numbers()
        slots = self._homes(highs[left], lows[left])
        while left.size:
            # of those that want one place the last one gets it; the others go on
            empty = view[slots] == EMPTY
            view[slots[empty]] = left[empty]
            lost = view[slots] != left
            left, slots = left[lost], (slots[lost] + 1) & (view.size - 1)
        self._table = table
        self._used = self._count
