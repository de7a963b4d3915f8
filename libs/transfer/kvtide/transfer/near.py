"""Shared memory of a peer that is read at once, by whoever asks, in few steps."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import addressof
from operator import attrgetter
from types import TracebackType
from typing import Self

from xxhash import xxh3_64_intdigest

from kvtide.transfer.buffers import are_apart
from kvtide.transfer.lone import SMALL_BYTES
from kvtide.transfer.shm import Attached

Reach = Callable[[], Attached | None]
"""The memory, while the right to it holds and the peer is there."""

Done = Callable[[int], None]
"""Hears how many bytes were read in all."""

_char_at = ctypes.c_char.from_buffer
_form_of = attrgetter("format", "ndim")
_PLAIN = {("B", 1)}
_move = ctypes.memmove


class Near(AbstractContextManager["Near"]):
    """One region that this process can copy from by itself; made by ``TransferPeer.near``.

    Reads are over when they return: nobody can cancel them, and an event loop waits for
    as long as they copy (about 0.15 ms a MiB). For one thread, for a while: see
    ``close``. Whatever there is to be said about a range or targets (that two overlap, that
    the right has ended) ``TransferPeer.read`` says: here the answer is None.
    """

    def __init__(self, reach: Reach, length: int, done: Done) -> None:
        """``length``: of the region by its handle."""
        self._reach = reach
        self._length = length
        self._done = done
        self._nbytes = 0

    def peek(self, offset: int, length: int) -> bytes | None:
        """A private copy of a short range; None: see the class."""
        memory = self._memory(offset, length)
        if memory is None:
            return None
        self._nbytes += length
        return memory.view[offset : offset + length].tobytes()

    def read(self, offset: int, targets: Sequence[memoryview]) -> list[int] | None:
        """Fill the targets, one behind the other, from ``offset`` on; xxh3_64 of each.

        They are private memory, as ``ReadSlice.into``. The sums are of what lies in
        them then. None: see the class.
        """
        lengths = list(map(len, targets))
        nbytes = sum(lengths)
        memory = self._memory(offset, nbytes)
        starts = _starts(targets, lengths)
        if memory is None or starts is None:
            return None
        if max(lengths) > SMALL_BYTES:
            xxh3 = _copy_long(memory.address + offset, starts, targets, lengths)
        else:
            xxh3 = _copy_short(memory.view, offset, targets, lengths)
        self._nbytes += nbytes
        return xxh3

    def _memory(self, offset: int, length: int) -> Attached | None:
        memory = self._reach()
        if memory is None or offset < 0 or length <= 0:
            return None
        if length > min(self._length, len(memory.view)) - offset:
            return None
        return memory if memory.present(offset, length) else None

    def close(self) -> None:
        """Say how much was read; once, soon: that is one operation for the metrics."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._done(nbytes)

    def __enter__(self) -> Self:
        """As it is."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _starts(
    targets: Sequence[memoryview], lengths: Sequence[int]
) -> Sequence[int] | None:
    """Addresses of writable memory; None: one is not, or two overlap."""
    try:
        starts = list(map(addressof, map(_char_at, targets)))
    except (TypeError, ValueError):
        return None
    return starts if are_apart(starts, lengths) else None


def _copy_short(
    view: memoryview, offset: int, targets: Sequence[memoryview], lengths: Sequence[int]
) -> list[int] | None:
    xxh3: list[int] = []
    try:
        for target, length in zip(targets, lengths, strict=True):
            end = offset + length
            target[:] = view[offset:end]
            xxh3.append(xxh3_64_intdigest(target))
            offset = end
    except (ValueError, NotImplementedError):
        # a view of another form than flat bytes
        return None
    return xxh3


def _copy_long(
    source: int,
    starts: Sequence[int],
    targets: Sequence[memoryview],
    lengths: Sequence[int],
) -> list[int] | None:
    """As ``_copy_short``, but others can run meanwhile."""
    if set(map(_form_of, targets)) != _PLAIN:
        return None
    xxh3: list[int] = []
    for target, start, length in zip(targets, starts, lengths, strict=True):
        _move(start, source, length)
        xxh3.append(xxh3_64_intdigest(target))
        source += length
    return xxh3
