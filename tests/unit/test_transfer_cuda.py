"""A GPU's memory as a region: where it lies, its staging, and a driver that is missing.

The driver here is made up, and its GPU's memory is the host's. Tests on a real GPU are
marked so, and use NVIDIA's driver alone.
"""

import ctypes
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    DeviceMemory,
    Endpoint,
    OutOfBounds,
    ReadSlice,
    Refused,
    TransferError,
    Unreachable,
    WriteSlice,
    cuda,
)
from kvtide.transfer.buffers import address_of
from kvtide.transfer.own_ways import System

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20


@dataclass
class PretendedDriver:
    """Copies memory of this process, and counts what is pinned."""

    pinned: dict[int, ctypes.Array[ctypes.c_char]] = field(
        default_factory=dict[int, "ctypes.Array[ctypes.c_char]"]
    )
    fails: bool = False
    fetched: int = 0
    put_bytes: int = 0
    closed: bool = False

    def pin(self, length: int) -> int:
        memory = ctypes.create_string_buffer(length)
        self.pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def fetch(self, target: int, source: int, length: int) -> None:
        self._check()
        self.fetched += length
        ctypes.memmove(target, source, length)

    def put(self, target: int, source: int, length: int) -> None:
        self._check()
        self.put_bytes += length
        ctypes.memmove(target, source, length)

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.fails:
            raise Unreachable("the GPU is lost")


@pytest.fixture
def driver() -> PretendedDriver:
    return PretendedDriver()


def make(node: str, driver: PretendedDriver) -> Endpoint:
    def open_driver(index: int) -> PretendedDriver:
        assert index == 1
        return driver

    return Endpoint(
        node=node,
        epoch=1,
        secret=SECRET,
        clock=SystemClock(),
        system=System(cuda=open_driver),
    )


@pytest.fixture
async def owner(driver: PretendedDriver) -> AsyncIterator[Endpoint]:
    async with make("owner", driver) as endpoint:
        yield endpoint
    assert driver.pinned == {}


@pytest.fixture
async def reader(driver: PretendedDriver) -> AsyncIterator[Endpoint]:
    async with make("reader", driver) as endpoint:
        yield endpoint


class OnDevice:
    """As torch's and CuPy's arrays describe themselves."""

    def __init__(self, memory: bytearray, **changes: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (len(memory) // 4, 2),
            "typestr": "<f2",
            "data": (address_of(memoryview(memory)), False),
            "strides": None,
            "version": 3,
            **changes,
        }


async def test_reads_and_writes_go_through_pinned_memory(
    owner: Endpoint, reader: Endpoint, driver: PretendedDriver
) -> None:
    on_device = bytearray(os.urandom(5 * MIB))
    region = owner.register(OnDevice(on_device), name="kv", location="cuda:1")
    assert (region.length, region.staged, len(region.view)) == (5 * MIB, True, 0)
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(5 * MIB - 7))
    result = await peer.read([ReadSlice(region.handle(), 7, into)], timeout_s=20)
    assert into == on_device[7:]
    # on the same host too: what is on a GPU can't be mapped
    assert (peer.path, result.path) == ("shm", "tcp")
    assert driver.fetched == 5 * MIB - 7
    news = os.urandom(3 * MIB)
    handle = region.handle(Access.WRITE)
    await peer.write([WriteSlice(handle, 9, memoryview(news))], timeout_s=20)
    assert on_device[9 : 9 + 3 * MIB] == news
    assert driver.put_bytes == 3 * MIB
    with pytest.raises(OutOfBounds):
        await peer.read([ReadSlice(handle, 8, into)], timeout_s=20)
    with pytest.raises(Refused):
        await peer.map_async(region.handle())
    await owner.deregister(region)
    assert driver.pinned == {}
    await owner.close()
    assert driver.closed


async def test_a_gpu_that_fails_is_an_error_of_the_transfer(
    owner: Endpoint, reader: Endpoint, driver: PretendedDriver
) -> None:
    on_device = bytearray(os.urandom(MIB))
    region = owner.register(OnDevice(on_device), name="kv", location="cuda:1")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(MIB))
    handle = region.handle(Access.WRITE)
    before = bytes(on_device)
    driver.fails = True
    with pytest.raises(TransferError, match="the GPU is lost"):
        await peer.read([ReadSlice(handle, 0, into)], timeout_s=20)
    with pytest.raises(TransferError, match="the GPU is lost"):
        await peer.write([WriteSlice(handle, 0, into)], timeout_s=20)
    assert on_device == before
    driver.fails = False
    await peer.read([ReadSlice(handle, 0, into)], timeout_s=20)
    assert into == on_device


def test_where_a_buffer_lies() -> None:
    memory = bytearray(64)
    address = address_of(memoryview(memory))
    assert cuda.device_memory(OnDevice(memory)) == DeviceMemory(address, 64)
    rows = OnDevice(memory, shape=(4, 2), strides=(4, 2))
    assert cuda.device_memory(rows) == DeviceMemory(address, 16)
    given = DeviceMemory(address, 5)
    assert cuda.device_memory(given) is given
    for wrong, said in (
        (memory, "__cuda_array_interface__"),
        (OnDevice(memory, shape=(4, 2), strides=(2, 8)), "contiguous"),
        (OnDevice(memory, shape=(0, 2)), "empty"),
        (DeviceMemory(0, 5), "address"),
    ):
        with pytest.raises(OutOfBounds, match=said):
            cuda.device_memory(wrong)


@pytest.mark.parametrize("location", ["cuda:", "cuda:x", "cuda:-1"])
def test_a_location_that_is_no_gpu(location: str) -> None:
    with pytest.raises(OutOfBounds, match="no GPU"):
        cuda.index_of(location)


def test_pinned_memory_is_bounded_and_used_again(
    driver: PretendedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MOST_STAGED_BYTES", 256 << 10)
    monkeypatch.setattr(cuda, "WAIT_S", 0.05)
    memory = bytearray(os.urandom(MIB))
    stage = cuda.Stage(DeviceMemory(address_of(memoryview(memory)), MIB), driver)
    for _ in range(3):
        windows = [stage.window(0, 100_000, fill=True) for _ in range(2)]
        assert len(driver.pinned) == 2
        for window in windows:
            assert window.view == memory[:100_000]
        with pytest.raises(Unreachable, match="pinned"):
            stage.window(0, 100_000, fill=False)
        for window in windows:
            window.close()
    # of another size, and larger than all: what is free gives way
    large = stage.window(5, MIB - 5, fill=True)
    assert large.view == memory[5:]
    assert len(driver.pinned) == 1
    large.close()
    driver.fails = True
    with pytest.raises(Unreachable, match="lost"):
        stage.window(0, 10, fill=True)
    stage.dispose()
    assert driver.pinned == {}


def has_driver() -> bool:
    try:
        ctypes.CDLL(cuda.LIBRARY)
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="NVIDIA's driver is there")
def test_without_the_driver_it_is_refused_and_said() -> None:
    endpoint = Endpoint(node="a", epoch=1, secret=SECRET, clock=SystemClock())
    with pytest.raises(Refused, match="needs NVIDIA's driver") as caught:
        endpoint.register_address(1 << 40, 4096, name="kv", location="cuda:0")
    assert "register memory of the host" in str(caught.value)
    with pytest.raises(OutOfBounds, match="not allocated"):
        endpoint.allocate(4096, name="kv", location="cuda:0")
    endpoint.close_blocking()


async def test_host_memory_by_its_address() -> None:
    memory = bytearray(b"some bytes")
    async with (
        Endpoint(node="a", epoch=1, secret=SECRET, clock=SystemClock()) as owner,
        Endpoint(node="b", epoch=1, secret=SECRET, clock=SystemClock()) as reader,
    ):
        address = address_of(memoryview(memory))
        region = owner.register_address(address, 10, name="raw")
        peer = await reader.connect(owner.address)
        handle = region.handle(Access.WRITE)
        source = memoryview(b"same")
        await peer.write([WriteSlice(handle, 0, source)], timeout_s=10)
        assert memory == b"same bytes"
        with pytest.raises(OutOfBounds):
            owner.register_address(0, 10, name="nothing")


@pytest.mark.gpu
@pytest.mark.skipif(not has_driver(), reason="no NVIDIA driver: needs a GPU")
async def test_a_real_gpu() -> None:
    gpu = cuda.CudaDriver(0)
    library = ctypes.CDLL(cuda.LIBRARY)
    data = os.urandom(64 * MIB)
    host = gpu.pin(len(data))
    ctypes.memmove(host, data, len(data))
    address = ctypes.c_uint64()
    size = ctypes.c_size_t(len(data))
    assert library.cuMemAlloc_v2(ctypes.byref(address), size) == 0
    gpu.put(address.value, host, len(data))
    async with (
        Endpoint(node="a", epoch=1, secret=SECRET, clock=SystemClock()) as owner,
        Endpoint(node="b", epoch=1, secret=SECRET, clock=SystemClock()) as reader,
    ):
        memory = DeviceMemory(address.value, len(data))
        region = owner.register(memory, name="kv", location="cuda:0")
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(len(data)))
        await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=60)
        assert into == data
        news = memoryview(os.urandom(5 * MIB + 1))
        handle = region.handle(Access.WRITE)
        await peer.write([WriteSlice(handle, 3, news)], timeout_s=60)
        gpu.fetch(host, address.value, len(data))
        assert ctypes.string_at(host + 3, len(news)) == news
        assert ctypes.string_at(host, 3) == data[:3]
    library.cuMemFree_v2(address)
    gpu.unpin(host)
    gpu.close()
