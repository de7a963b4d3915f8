"""RDMA going wrong, on real verbs: `make test-rdma` runs this in a virtual machine."""

# ruff: noqa: S603, S607, T201, ASYNC110, ASYNC220, ASYNC221 - it runs itself and `ip`

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    AccessDenied,
    Endpoint,
    EndpointAddress,
    Operation,
    ReadSlice,
    Refused,
    RegionHandle,
    Unreachable,
    WriteSlice,
)
from kvtide.transfer.buffers import address_of
from kvtide.transfer.peer import SocketPeer
from kvtide.transfer.verbs import Device, Pair, Work, device_names

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20
CLOCK = SystemClock()


def devices() -> list[str]:
    try:
        return device_names()
    except Refused:
        return []


pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not devices(), reason="no RDMA device: see `make test-rdma`"),
]
# only the virtual machine has links that a test may cut
can_cut = pytest.mark.skipif(
    not Path("/sys/class/net/rnic1").exists(), reason="no link to cut"
)


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.retries: list[str] = []

    def transferred(
        self, path: str, purpose: str, operation: Operation, nbytes: int, seconds: float
    ) -> None: ...

    def failed(
        self, path: str, purpose: str, operation: Operation, kind: str
    ) -> None: ...

    def retried(self, path: str, purpose: str, reason: str) -> None:
        self.retries.append(reason)

    def served(
        self, path: str, purpose: str, operation: Operation, nbytes: int
    ) -> None: ...

    def refused(self, reason: str) -> None: ...


def make(
    node: str, names: list[str] | None = None, notes: Notes | None = None
) -> Endpoint:
    return Endpoint(
        node=node,
        epoch=1,
        secret=SECRET,
        clock=CLOCK,
        shm_dir=None,
        rdma_devices=names,
        observer=notes,
    )


@pytest.fixture
async def owner() -> AsyncIterator[Endpoint]:
    async with make("owner") as endpoint:
        yield endpoint


@pytest.fixture
async def reader() -> AsyncIterator[Endpoint]:
    async with make("reader") as endpoint:
        yield endpoint


def rail_bytes(peer: SocketPeer) -> dict[str, int]:
    return {rail.name: rail.moved_bytes for rail in peer.rails()}


async def test_more_pieces_than_credits(owner: Endpoint, reader: Endpoint) -> None:
    data = os.urandom(MIB)
    region = owner.register(bytearray(data), name="arena")
    peer = await reader.connect(owner.address)
    handle = region.handle(Access.WRITE)
    into = bytearray(MIB)
    view = memoryview(into)
    parts = range(0, MIB, 1024)
    result = await peer.read(
        [ReadSlice(handle, at, view[at : at + 1024]) for at in parts], timeout_s=60
    )
    assert into == data
    assert result.path == "rdma"
    news = memoryview(os.urandom(MIB))
    await peer.write(
        [WriteSlice(handle, at, news[at : at + 1024]) for at in parts], timeout_s=60
    )
    assert region.view == news


async def test_both_devices_share_the_work(owner: Endpoint, reader: Endpoint) -> None:
    if len(devices()) < 2:
        pytest.skip("needs two devices")
    data = os.urandom(16 * MIB)
    region = owner.register(data, name="arena")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(16 * MIB))
    await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=120)
    assert into == data
    moved = rail_bytes(peer)
    first, second = devices()[:2]
    assert moved[first] + moved[second] == 16 * MIB
    assert min(moved[first], moved[second]) >= 2 * MIB


async def test_region_deregistered_while_in_use(
    owner: Endpoint, reader: Endpoint
) -> None:
    region = owner.register(bytearray(8 * MIB), name="arena")
    other = owner.register(b"still here", name="other")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(8 * MIB))
    slices = [ReadSlice(region.handle(), 0, into)]
    await peer.read(slices, timeout_s=60)
    transfer = peer.read(slices, timeout_s=60)
    await owner.deregister(region)
    with contextlib.suppress(AccessDenied):
        # it may have been done already
        await transfer
    with pytest.raises(AccessDenied, match="gone"):
        await peer.read(slices, timeout_s=60)
    await peer.read([ReadSlice(other.handle(), 0, into[:10])], timeout_s=60)
    assert bytes(into[:10]) == b"still here"


@can_cut
async def test_link_down_in_mid_transfer(owner: Endpoint) -> None:
    notes = Notes()
    data = os.urandom(32 * MIB)
    region = owner.register(data, name="arena")
    async with make("reader", notes=notes) as reader:
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(32 * MIB))
        slices = [ReadSlice(region.handle(), 0, into)]
        transfer = peer.read(slices, timeout_s=200)
        async with asyncio.timeout(60):
            while rail_bytes(peer)["rxe1"] == 0:
                await asyncio.sleep(0.01)
        subprocess.run(["ip", "link", "set", "rnic1", "down"], check=True)
        try:
            await transfer
            assert into == data
            assert notes.retries
            cut = rail_bytes(peer)
            assert cut["rxe0"] > cut["rxe1"]
            assert cut["rxe0"] + cut["rxe1"] == 32 * MIB
        finally:
            subprocess.run(["ip", "link", "set", "rnic1", "up"], check=True)
        async with asyncio.timeout(120):
            while rail_bytes(peer)["rxe1"] == cut["rxe1"]:
                await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=100)
        assert into == data


@can_cut
async def test_all_links_down_leaves_tcp(owner: Endpoint, reader: Endpoint) -> None:
    data = os.urandom(4 * MIB)
    region = owner.register(data, name="arena")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(4 * MIB))
    slices = [ReadSlice(region.handle(), 0, into)]
    try:
        for link in ("rnic0", "rnic1"):
            subprocess.run(["ip", "link", "set", link, "down"], check=True)
        result = await peer.read(slices, timeout_s=60)
        assert into == data
        assert result.path == "tcp"
    finally:
        for link in ("rnic0", "rnic1"):
            subprocess.run(["ip", "link", "set", link, "up"], check=True)


@can_cut
async def test_a_device_that_appears_is_used() -> None:
    def run(words: str) -> None:
        subprocess.run(words.split(), check=True)

    async with make("owner") as owner, make("reader") as reader:
        data = os.urandom(8 * MIB)
        region = owner.register(data, name="arena")
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(8 * MIB))
        slices = [ReadSlice(region.handle(), 0, into)]
        await peer.read(slices, timeout_s=100)
        assert "rxe2" not in rail_bytes(peer)
        run("ip link add rnic2 type dummy")
        run("ip link set rnic2 mtu 4200 address 02:00:0a:4d:02:01")
        run("ip addr add 10.77.2.1/24 dev rnic2")
        run("ip link set rnic2 up")
        run("rdma link add rxe2 type rxe netdev rnic2")
        # both ends find it by themselves
        async with asyncio.timeout(100):
            while not rail_bytes(peer).get("rxe2"):
                into[:] = bytes(8 * MIB)
                await peer.read(slices, timeout_s=100)
                assert into == data
    run("rdma link delete rxe2")
    run("ip link delete rnic2")


async def test_owner_killed_in_mid_transfer(reader: Endpoint) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = json.loads(await asyncio.to_thread(process.stdout.readline))
        address = EndpointAddress(**said["address"])
        capability = bytes.fromhex(said["handle"].pop("capability"))
        handle = RegionHandle(**said["handle"], capability=capability)
        peer = await reader.connect(address, timeout_s=30)
        into = memoryview(bytearray(64 * MIB))
        transfer = peer.read([ReadSlice(handle, 0, into)], timeout_s=200)
        async with asyncio.timeout(60):
            while sum(rail_bytes(peer).values()) == 0:
                await asyncio.sleep(0.01)
        killed = time.perf_counter()
        process.kill()
        with pytest.raises(Unreachable):
            await transfer
        # far below the 200 s that it was given
        assert time.perf_counter() - killed < 30
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def complete(pair: Pair, count: int) -> list[str]:
    deadline = time.perf_counter() + 30
    found: list[str] = []
    while len(found) < count and time.perf_counter() < deadline:
        found += [each.status for each in pair.completions()]
    return found


@pytest.mark.parametrize("wrong", ["key", "end"])
def test_bad_key_and_past_the_end(wrong: str) -> None:
    """The device itself refuses what our checks would have stopped before."""
    device = Device(devices()[0])
    ours, theirs = bytearray(8192), bytearray(4096)
    here = device.register(
        address_of(memoryview(ours)), 8192, local_write=True, remote=""
    )
    there = device.register(
        address_of(memoryview(theirs)), 4096, local_write=False, remote="write"
    )
    left, right = device.pair(), device.pair()
    left.connect(right.address)
    right.connect(left.address)

    def work(number: int, length: int, key: int) -> Work:
        return Work(
            number,
            True,
            address_of(memoryview(ours)),
            here.local_key,
            length,
            address_of(memoryview(theirs)),
            key,
            signaled=True,
        )

    good = work(1, 4096, there.remote_key)
    bad = {
        "key": work(2, 4096, there.remote_key ^ 0x5A00),
        "end": work(2, 4097, there.remote_key),
    }[wrong]
    ours[:] = b"a" * 8192
    left.post([good])
    assert complete(left, 1) == ["SUCCESS"]
    assert theirs == b"a" * 4096
    left.post([bad])
    left.post([good])
    assert complete(left, 2) == ["REM_ACCESS_ERR", "WR_FLUSH_ERR"]
    # reset at both ends, the same pair works again
    left.reset()
    right.reset()
    left.connect(right.address)
    right.connect(left.address)
    ours[:] = b"b" * 8192
    left.post([good])
    assert complete(left, 1) == ["SUCCESS"]
    assert theirs == b"b" * 4096
    for thing in (left, right, here, there):
        thing.close()
    device.close()


def open_files() -> list[str]:
    found: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(path.readlink()))
    return sorted(name for name in found if "infiniband" in name or "event" in name)


async def test_nothing_is_left() -> None:
    async def use() -> None:
        async with make("owner") as owner, make("reader") as reader:
            region = owner.register(bytearray(MIB), name="arena")
            peer = await reader.connect(owner.address)
            into = memoryview(bytearray(MIB))
            for cancelled in (False, True, False):
                transfer = peer.read(
                    [ReadSlice(region.handle(), 0, into)], timeout_s=60
                )
                if cancelled:
                    transfer.cancel()
                    continue
                await transfer

    await use()
    files = open_files()
    await use()
    assert open_files() == files
    assert [each.name for each in threading.enumerate() if "rdma" in each.name] == []


async def own() -> None:
    """The owner's process."""
    async with make("owner") as endpoint:
        region = endpoint.register(bytearray(64 * MIB), name="arena")
        address, handle = endpoint.address, region.handle()
        said = {
            "address": {name: getattr(address, name) for name in address.__slots__},
            "handle": {name: getattr(handle, name) for name in handle.__slots__},
        }
        said["handle"]["capability"] = handle.capability.hex()
        print(json.dumps(said), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(own())
