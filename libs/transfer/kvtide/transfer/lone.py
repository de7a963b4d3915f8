"""One slice with nothing in its way: what can be seen of that in few steps. Pure."""

import ctypes
from ctypes import addressof

from xxhash import xxh3_64_intdigest

from kvtide.transfer.buffers import COPY_BYTES
from kvtide.transfer.capability import CAPABILITY_BYTES
from kvtide.transfer.handles import ReadSlice, WriteSlice
from kvtide.transfer.shm import Attached

MOST_COPIED_BYTES = COPY_BYTES
"""More is copied in windows, between which the deadline is looked at."""

SMALL_BYTES = 64 << 10
"""So little is copied before it would pay to let another thread run meanwhile."""

_NO_REGION = 1 << 64
_char_at = ctypes.c_char.from_buffer
_move = ctypes.memmove


def is_plain(place: ReadSlice | WriteSlice, node: str, epoch: int) -> bool:
    """Whether there is nothing to say about the slice of a peer: all checks pass.

    Those of ``requests.batch_of``; that a target is writable is not among them. Bytes
    that are no plain view, and empty ones, need more steps than these.
    """
    handle, offset, view = place
    return (
        type(view) is memoryview
        and view.format == "B"
        and view.ndim == 1
        and view.c_contiguous
        and handle.node == node
        and handle.epoch == epoch
        and type(handle.capability) is bytes
        and len(handle.capability) == CAPABILITY_BYTES
        and type(handle.region) is int
        and 0 <= handle.region < _NO_REGION
        and type(offset) is int
        and offset >= 0
        and 0 < len(view) <= handle.length - offset
    )


def read_shared(memory: Attached, offset: int, into: memoryview) -> int | None:
    """Copy into private memory; xxh3_64 of what lies there then. None: see ``shm.backed``."""
    size = len(into)
    if not memory.backed(offset, size, write=False):
        return None
    if size <= SMALL_BYTES:
        into[:] = memory.view[offset : offset + size]
    else:
        _move(addressof(_char_at(into)), memory.address + offset, size)
    return xxh3_64_intdigest(into)


def write_shared(memory: Attached, offset: int, source: memoryview) -> int | None:
    """Copy to shared memory; xxh3_64 of what lies there then. None: see ``shm.backed``."""
    if not memory.backed(offset, len(source), write=True):
        return None
    target = memory.view[offset : offset + len(source)]
    if len(source) <= SMALL_BYTES or source.readonly:
        target[:] = source
    else:
        _move(memory.address + offset, addressof(_char_at(source)), len(source))
    return xxh3_64_intdigest(target)
