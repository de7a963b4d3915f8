"""Plain views of buffers, their addresses, and copies that let other threads run."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import addressof
from itertools import pairwise
from operator import add, le

import xxhash

from kvtide.transfer.errors import OutOfBounds

WINDOW_BYTES = 1 << 20
"""Bytes that are received before they are hashed: in the cache still, and few calls.
Of 256 KiB, streams of 1 MiB were seen at 0.76 of a bare socket, of this at 0.87."""

COPY_BYTES = 1 << 20
"""Bytes that are copied at a time. libc's memmove takes another way from about half of
this on: below, it was seen five times slower where the target lies 16 bytes further into
its page than the source, as a bytearray does to mapped memory."""


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_char_at = ctypes.c_char.from_buffer
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def plain_view(buffer: object, *, slice_index: int | None = None) -> memoryview:
    """The buffer as a flat view of unsigned bytes, without a copy.

    Raises:
        OutOfBounds: it is no buffer, or not contiguous.
    """
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
        if view.format != "B" or view.ndim != 1:
            return view.cast("B")
        if not view.c_contiguous:
            raise OutOfBounds("memory must be contiguous", slice_index=slice_index)
    except TypeError as error:
        raise OutOfBounds(
            f"not usable as contiguous memory: {error}", slice_index=slice_index
        ) from error
    return view


def memory_at(address: int, length: int) -> memoryview:
    """The memory there, as writable bytes; its owner must keep it alive."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    """Where the memory lies; good while ``view`` (or what it views) is held."""
    if not view.readonly and len(view):
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    found = _PyBuffer()
    _get_buffer(view, ctypes.byref(found), 0)
    try:
        return int(found.buf or 0)
    finally:
        _release_buffer(ctypes.byref(found))


def check_targets(targets: Sequence[memoryview]) -> None:
    """Raise OutOfBounds unless all are writable and no two overlap."""
    if len(targets) == 1 and not targets[0].readonly:
        return
    try:
        starts = list(map(addressof, map(_char_at, targets)))
    except (TypeError, ValueError):
        # one is read-only or empty
        _check_closely(targets)
        return
    if not are_apart(starts, list(map(len, targets))):
        _check_closely(targets)


def are_apart(starts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether no two ranges overlap. Hundreds are usual: no step in Python for each."""
    ends = list(map(add, starts, lengths))
    # they often are in order
    if all(map(le, ends, starts[1:])):
        return True
    first, last = zip(*sorted(zip(starts, ends, strict=True)), strict=True)
    return all(map(le, last, first[1:]))


def _check_closely(targets: Sequence[memoryview]) -> None:
    spans: list[tuple[int, int, int]] = []
    for index, view in enumerate(targets):
        if view.readonly:
            raise OutOfBounds("the target is read-only", slice_index=index)
        if len(view):
            start = address_of(view)
            spans.append((start, start + len(view), index))
    spans.sort()
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise OutOfBounds(
                f"the targets of slices {before[2]} and {after[2]} overlap",
                slice_index=after[2],
            )


def copy_and_hash(
    target: memoryview, source: memoryview, stop: Callable[[], bool]
) -> int:
    """Copy, and return xxh3_64 of what lies in ``target``; the GIL is free meanwhile.

    ``stop`` is asked between windows; when true the rest is left undone. Both views
    have equal length and do not overlap.
    """
    total = len(target)
    if len(source) != total:
        message = f"{len(source)} bytes do not fill {total}"
        raise ValueError(message)
    to, source_at = address_of(target), address_of(source)
    if total <= COPY_BYTES:
        ctypes.memmove(to, source_at, total)
        return xxhash.xxh3_64_intdigest(target)
    digest = xxhash.xxh3_64()
    for start in range(0, total, COPY_BYTES):
        if stop():
            break
        size = min(COPY_BYTES, total - start)
        ctypes.memmove(to + start, source_at + start, size)
        digest.update(target[start : start + size])
    return digest.intdigest()


class SliceDigest:
    """xxh3_64 of a slice whose pieces become ready in any order, from any thread.

    Whoever brings the piece that comes next hashes it, and those after it that are
    ready. When all bringers have returned, all is hashed.
    """

    def __init__(self, view: memoryview) -> None:
        """Of the whole of ``view``."""
        self._view = view
        self._lock = threading.Lock()
        self._ready: dict[int, int] = {}
        self._next = 0
        self._busy = False
        self._digest = xxhash.xxh3_64()

    def ready(self, start: int, length: int) -> None:
        """The bytes of a piece are what they shall be."""
        with self._lock:
            self._ready[start] = length
            if self._busy:
                return
            self._busy = True
        while (part := self._take()) is not None:
            self._digest.update(part)

    def _take(self) -> memoryview | None:
        with self._lock:
            length = self._ready.pop(self._next, None)
            if length is None:
                self._busy = False
                return None
            start, self._next = self._next, self._next + length
        return self._view[start : start + length]

    def value(self) -> int:
        """The digest, once all pieces were ready."""
        return self._digest.intdigest()
