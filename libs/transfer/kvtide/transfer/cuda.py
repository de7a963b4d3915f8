"""Memory of NVIDIA's GPUs as regions, staged through pinned memory of the host.

Knows no torch: a buffer says where its memory lies by ``__cuda_array_interface__``
(torch, CuPy, Numba, JAX), or the caller does with ``DeviceMemory``. NVIDIA's driver is
loaded only when the first region on a GPU is registered.

A peer's request is served from a piece of pinned memory that is filled from the GPU
before it is sent; what a peer writes is copied to the GPU once its checksum was found
right. So wrong bytes never reach the GPU. The owner sees to it that its own streams have
finished writing before it hands out a handle: the copies here wait for no stream.
"""

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kvtide.transfer.buffers import memory_at
from kvtide.transfer.errors import OutOfBounds, Refused, Unreachable

LIBRARY = "libcuda.so.1"
PREFIX = "cuda:"
MOST_STAGED_BYTES = 256 << 20
"""Pinned memory of one region; one request may pass it."""

WAIT_S = 10.0
_LEAST_PINNED_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """``length`` bytes at ``address`` in a GPU's memory, held by the caller."""

    address: int
    length: int


class Driver(Protocol):
    """What is needed of a GPU's driver. Thread-safe; raises Unreachable."""

    def pin(self, length: int) -> int:
        """The address of new pinned memory of the host."""
        ...

    def unpin(self, address: int) -> None:
        """Give pinned memory back."""
        ...

    def fetch(self, target: int, source: int, length: int) -> None:
        """Copy from the GPU to the host; complete on return."""
        ...

    def put(self, target: int, source: int, length: int) -> None:
        """Copy from the host to the GPU; complete on return."""
        ...

    def close(self) -> None:
        """Let go of the GPU."""
        ...


def index_of(location: str) -> int:
    """The GPU of a location such as "cuda:0".

    Raises:
        OutOfBounds: it is none.
    """
    number = location.removeprefix(PREFIX)
    if not location.startswith(PREFIX) or not number.isdigit():
        raise OutOfBounds(f"{location!r} is no GPU such as 'cuda:0'")
    return int(number)


def device_memory(buffer: object) -> DeviceMemory:
    """Where a buffer of a GPU lies.

    Raises:
        OutOfBounds: it does not say, or is not contiguous; with what to do.
    """
    if isinstance(buffer, DeviceMemory):
        if buffer.length <= 0 or buffer.address <= 0:
            raise OutOfBounds("device memory needs an address and a length")
        return buffer
    described = getattr(buffer, "__cuda_array_interface__", None)
    if not isinstance(described, Mapping):
        raise OutOfBounds(
            f"a {type(buffer).__name__} does not say where in a GPU its memory lies: "
            "give something with __cuda_array_interface__, or a DeviceMemory"
        )
    array = cast("Mapping[str, Any]", described)
    item = int(str(array["typestr"])[2:])
    length = item
    for size in array["shape"]:
        length *= int(size)
    strides = array.get("strides")
    if strides is not None and not _contiguous(array["shape"], strides, item):
        raise OutOfBounds("device memory must be contiguous: copy it first")
    address = int(array["data"][0])
    if not length or not address:
        raise OutOfBounds("device memory must not be empty")
    return DeviceMemory(address, length)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    expected = item
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Window:
    """A piece of pinned memory for one range of a request."""

    def __init__(self, stage: "Stage", address: int, at: int, length: int) -> None:
        """Made by ``Stage.window``."""
        self._stage = stage
        self._address = address
        self._at = at
        self._length = length
        self.view = memory_at(address, length)

    def commit(self) -> None:
        """Copy what lies in it to the GPU.

        Raises:
            Unreachable: the driver reports an error.
        """
        self._stage.driver.put(self._at, self._address, self._length)

    def close(self) -> None:
        """Give the pinned memory back; the view is not to be used any more."""
        self._stage.give_back(self._address, self._length)


class Stage:
    """Serves ranges of a GPU's memory through pinned memory. Thread-safe.

    Pinned memory is kept for the next requests: to pin it takes longer than to fill it.
    """

    def __init__(self, memory: DeviceMemory, driver: Driver) -> None:
        """Of one region."""
        self.memory = memory
        self.driver = driver
        self._changed = threading.Condition()
        self._free: dict[int, list[int]] = {}
        self._pinned_bytes = 0

    def window(self, offset: int, length: int, *, fill: bool) -> Window:
        """A window on a range that lies inside the memory; ``fill``: as it is now.

        Raises:
            Unreachable: no pinned memory is to be had, or the driver reports an error.
        """
        room = _room(length)
        address = self._take(room)
        window = Window(self, address, self.memory.address + offset, length)
        if fill and length:
            try:
                self.driver.fetch(address, self.memory.address + offset, length)
            except BaseException:
                window.close()
                raise
        return window

    def give_back(self, address: int, length: int) -> None:
        """By ``Window.close``."""
        with self._changed:
            self._free.setdefault(_room(length), []).append(address)
            self._changed.notify_all()

    def commit(self, offset: int, length: int) -> None:
        """See ``regions.Backing``: a GPU's memory is there."""

    def release(self, offset: int, length: int) -> None:
        """See ``regions.Backing``: a GPU's memory is its owner's."""

    def dispose(self) -> None:
        """Give the pinned memory back; nobody uses the region any more."""
        with self._changed:
            free, self._free = self._free, {}
        for addresses in free.values():
            for address in addresses:
                self.driver.unpin(address)

    def _take(self, room: int) -> int:
        with self._changed:
            there = self._changed.wait_for(lambda: self._has(room), WAIT_S)
            if not there:
                raise Unreachable("peers hold all of the pinned memory", path="tcp")
            free = self._free.get(room)
            if free:
                return free.pop()
            self._pinned_bytes += room
        try:
            return self.driver.pin(room)
        except BaseException:
            with self._changed:
                self._pinned_bytes -= room
                self._changed.notify_all()
            raise

    def _has(self, room: int) -> bool:
        """Whether some is free, or may be pinned; unpins what has another size."""
        if self._free.get(room) or self._fits(room):
            return True
        for size, addresses in self._free.items():
            while addresses and not self._fits(room):
                self.driver.unpin(addresses.pop())
                self._pinned_bytes -= size
        return self._fits(room)

    def _fits(self, room: int) -> bool:
        return not self._pinned_bytes or self._pinned_bytes + room <= MOST_STAGED_BYTES


def _room(length: int) -> int:
    """Few sizes, so that what was pinned is of use again."""
    return max(_LEAST_PINNED_BYTES, 1 << max(0, length - 1).bit_length())


class CudaDriver:
    """NVIDIA's driver, by its C interface; see ``Driver``."""

    def __init__(self, index: int) -> None:
        """Take hold of the ``index``-th GPU's primary context.

        Raises:
            Refused: there is no driver or no such GPU; with what to do.
        """
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise Refused(
                f"memory on cuda:{index} needs NVIDIA's driver, and {LIBRARY} cannot "
                f"be loaded ({error}): install the driver, or register memory of the "
                "host",
                path="tcp",
            ) from error
        self._context = ctypes.c_void_p()
        self._device = ctypes.c_int()
        try:
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(index))
            self._call(
                "cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device
            )
        except Unreachable as error:
            raise Refused(
                f"cuda:{index} cannot be used: {error.message}", path="tcp"
            ) from error

    def pin(self, length: int) -> int:
        """See ``Driver.pin``."""
        address = ctypes.c_void_p()
        self._enter()
        size = ctypes.c_size_t(length)
        self._call("cuMemAllocHost_v2", ctypes.byref(address), size)
        return int(address.value or 0)

    def unpin(self, address: int) -> None:
        """See ``Driver.unpin``."""
        self._enter()
        self._call("cuMemFreeHost", ctypes.c_void_p(address))

    def fetch(self, target: int, source: int, length: int) -> None:
        """See ``Driver.fetch``."""
        self._enter()
        there, size = ctypes.c_uint64(source), ctypes.c_size_t(length)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(target), there, size)

    def put(self, target: int, source: int, length: int) -> None:
        """See ``Driver.put``."""
        self._enter()
        there, size = ctypes.c_uint64(target), ctypes.c_size_t(length)
        self._call("cuMemcpyHtoD_v2", there, ctypes.c_void_p(source), size)
        # from pinned memory it may return before all is there
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """See ``Driver.close``."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise Unreachable(f"{name} failed with {code} ({self._error(code)})")

    def _error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        return (text.value or b"unknown error").decode()
