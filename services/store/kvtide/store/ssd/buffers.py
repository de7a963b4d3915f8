"""Page-aligned memory for direct I/O, and copies that let other threads run."""

import ctypes
import mmap
import threading

from kvtide.store.ssd.format import PAGE_BYTES


def copy(target: memoryview, source: memoryview) -> None:
    """Copy between writable memories of equal length; the GIL is free meanwhile."""
    if len(target) != len(source):
        message = f"{len(source)} bytes do not fill {len(target)}"
        raise ValueError(message)
    to = ctypes.addressof(ctypes.c_char.from_buffer(target))
    at = ctypes.addressof(ctypes.c_char.from_buffer(source))
    ctypes.memmove(to, at, len(source))


class Buffers:
    """One buffer for each thread that asks, as long as its longest need."""

    def __init__(self) -> None:
        """None yet."""
        self._own = threading.local()

    def get(self, length: int) -> memoryview:
        """The calling thread's buffer; what was in it is undefined. Page-aligned."""
        mapping: mmap.mmap | None = getattr(self._own, "mapping", None)
        if mapping is None or len(mapping) < length:
            mapping = mmap.mmap(-1, max(length, PAGE_BYTES))
            self._own.mapping = mapping
        return memoryview(mapping)[:length]
