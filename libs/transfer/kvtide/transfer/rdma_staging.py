"""The memory that RDMA devices reach at our end: slots that requests pass through."""

import mmap

from kvtide.transfer.buffers import address_of
from kvtide.transfer.errors import TransferError
from kvtide.transfer.shm import close_mapping
from kvtide.transfer.verbs import Device, Memory

SLOT_BYTES = 1 << 20
"""A request over RDMA holds at most this much."""

SLOTS = 4


class Staging:
    """Registered with one device. For one thread."""

    def __init__(self, device: Device) -> None:
        """Make and register it.

        Raises:
            Unreachable: the device does not take it.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, SLOTS * SLOT_BYTES, flags=flags)
        self._view = memoryview(self._mapping)
        self._base = address_of(self._view)
        try:
            self._memory: Memory = device.register(
                self._base, len(self._view), local_write=True, remote=""
            )
        except TransferError:
            close_mapping(self._mapping)
            raise
        self.free = list(range(SLOTS))

    @property
    def key(self) -> int:
        """For work that the device does here."""
        return self._memory.local_key

    def address(self, at: int) -> int:
        """Of the byte ``at``."""
        return self._base + at

    def view(self, at: int, length: int) -> memoryview:
        """The bytes there."""
        return self._view[at : at + length]

    def free_all(self) -> None:
        """Nothing passes through any more."""
        self.free = list(range(SLOTS))

    def close(self) -> None:
        """Give it back; raises Unreachable if the device does not like that."""
        try:
            self._memory.close()
        finally:
            close_mapping(self._mapping)
