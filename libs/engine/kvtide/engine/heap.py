"""The C library's heap."""

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can (glibc).

    Loading a model frees large pieces that glibc would keep: 200 MB for the demo model.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
