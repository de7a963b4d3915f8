"""Cards, devices and hosts that come and go while transfers run."""

# ruff: noqa: ASYNC110 - conditions are polled with a deadline

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from tests.integration.transfer_fake_rdma import Fabric
from tests.integration.transfer_proxy import CLOCK, MIB, SECRET, Notes

from kvtide.transfer import (
    Access,
    AccessDenied,
    Endpoint,
    ReadSlice,
    SocketPeer,
    TimedOut,
    Topology,
    WriteSlice,
)
from kvtide.transfer.own_ways import ALL_CARDS, System
from kvtide.transfer.topology import Near


def moved_by(peer: SocketPeer) -> dict[str, int]:
    """Bytes by host or device."""
    found: dict[str, int] = {}
    for rail in peer.rails():
        name = rail.name.split("#")[0]
        found[name] = found.get(name, 0) + rail.moved_bytes
    return found


async def until_ways(peer: SocketPeer, *names: str) -> None:
    async with asyncio.timeout(40):
        while set(moved_by(peer)) != set(names):
            await asyncio.sleep(0.005)


# ---- hosts: all of 127.0.0.0/8 leads here


def owner_on(cards: list[str]) -> Endpoint:
    """Not yet started: an owner that is reached at whatever is in ``cards`` now."""
    return Endpoint(
        node="owner",
        epoch=1,
        secret=SECRET,
        clock=CLOCK,
        shm_dir=None,
        listen_host="0.0.0.0",
        advertise_host=ALL_CARDS,
        system=System(hosts=lambda: tuple(cards)),
    )


def reader_by_tcp() -> Endpoint:
    """Not yet started: a reader that shares no memory."""
    return Endpoint(node="reader", epoch=1, secret=SECRET, clock=CLOCK, shm_dir=None)


async def test_a_card_that_appears_is_used_and_one_that_goes_is_left() -> None:
    cards = ["127.0.0.1"]
    async with (
        owner_on(cards) as owner,
        reader_by_tcp() as reader,
    ):
        data = os.urandom(32 * MIB)
        region = owner.register(data, name="arena")
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(32 * MIB))
        slices = [ReadSlice(region.handle(), 0, into)]
        await peer.read(slices, timeout_s=60)
        assert moved_by(peer) == {"127.0.0.1": 32 * MIB}

        cards.append("127.0.0.2")
        # nobody says so: it is found by itself, in seconds
        await until_ways(peer, "127.0.0.1", "127.0.0.2")
        assert owner.address.host == "127.0.0.1,127.0.0.2"
        await peer.read(slices, timeout_s=60)
        assert moved_by(peer)["127.0.0.2"] >= 4 * MIB

        into[:] = bytes(32 * MIB)
        transfer = peer.read(slices, timeout_s=60)
        cards.remove("127.0.0.1")
        await asyncio.to_thread(owner.look_again)
        await transfer
        assert into == data
        await until_ways(peer, "127.0.0.2")
        before = moved_by(peer)["127.0.0.2"]
        await peer.read(slices, timeout_s=60)
        assert moved_by(peer) == {"127.0.0.2": before + 32 * MIB}
        # a reader that comes now hears of what there is now
        assert owner.address.host == "127.0.0.2"


# ---- devices: of a machine that is made up


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(["fake0", "fake1"])


def make(
    node: str,
    fabric: Fabric,
    *,
    notes: Notes | None = None,
    topology: Topology | None = None,
    location: str | None = None,
) -> Endpoint:
    return Endpoint(
        node=node,
        epoch=1,
        secret=SECRET,
        clock=CLOCK,
        shm_dir=None,
        rdma_devices=None,
        system=fabric.system(),
        observer=notes,
        topology=topology,
        location=location,
    )


@pytest.fixture
async def owner(fabric: Fabric) -> AsyncIterator[Endpoint]:
    async with make("owner", fabric) as endpoint:
        yield endpoint


@pytest.fixture
async def reader(fabric: Fabric) -> AsyncIterator[Endpoint]:
    async with make("reader", fabric) as endpoint:
        yield endpoint


async def test_both_devices_carry_reads_and_writes(
    owner: Endpoint, reader: Endpoint, fabric: Fabric
) -> None:
    data = os.urandom(16 * MIB)
    region = owner.register(bytearray(data), name="arena")
    peer = await reader.connect(owner.address)
    assert peer.path == "rdma"
    into = memoryview(bytearray(16 * MIB))
    result = await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=60)
    assert (into, result.path) == (data, "rdma")
    news = memoryview(os.urandom(3 * MIB))
    handle = region.handle(Access.WRITE)
    await peer.write([WriteSlice(handle, 5, news)], timeout_s=60)
    assert region.view[5 : 5 + 3 * MIB] == news
    assert fabric.moved.keys() == {"fake0", "fake1"}
    assert sum(fabric.moved.values()) == 19 * MIB


async def test_devices_come_and_go(
    owner: Endpoint, reader: Endpoint, fabric: Fabric
) -> None:
    data = os.urandom(8 * MIB)
    region = owner.register(data, name="arena")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(8 * MIB))
    slices = [ReadSlice(region.handle(), 0, into)]

    async def look() -> None:
        for endpoint in (owner, reader):
            await asyncio.to_thread(endpoint.look_again)

    async def read() -> dict[str, int]:
        into[:] = bytes(8 * MIB)
        fabric.moved.clear()
        await peer.read(slices, timeout_s=60)
        assert into == data
        return dict(fabric.moved)

    assert sum((await read()).values()) == 8 * MIB
    fabric.there.remove("fake1")
    await look()
    assert sorted(fabric.open) == ["fake0", "fake0"]
    assert await read() == {"fake0": 8 * MIB}
    # without any device what is left is TCP
    fabric.there.clear()
    await look()
    assert fabric.open == []
    assert await read() == {}
    assert peer.path == "tcp"
    # back, and one that was never there: the region is reached by it too
    fabric.there[:] = ["fake0", "fake1", "fake2"]
    await look()
    await until_ways(peer, "fake0", "fake1", "fake2", "127.0.0.1")
    assert (await read()).keys() == {"fake0", "fake1", "fake2"}
    assert peer.path == "rdma"
    await owner.deregister(region)
    with pytest.raises(AccessDenied, match="gone"):
        await peer.read(slices, timeout_s=60)


async def test_a_device_goes_in_mid_transfer(owner: Endpoint, fabric: Fabric) -> None:
    notes = Notes()
    data = os.urandom(64 * MIB)
    region = owner.register(data, name="arena")
    async with make("reader", fabric, notes=notes) as reader:
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(64 * MIB))
        transfer = peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=60)
        async with asyncio.timeout(40):
            while fabric.moved.get("fake1", 0) < MIB:
                await asyncio.sleep(0)
        fabric.there.remove("fake1")
        await asyncio.to_thread(reader.look_again)
        await transfer
        assert into == data
        # given back, not failed: no retry is spent
        assert notes.retries == []


async def test_a_link_goes_down_and_comes_up(
    owner: Endpoint, reader: Endpoint, fabric: Fabric
) -> None:
    region = owner.register(os.urandom(8 * MIB), name="arena")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(8 * MIB))
    slices = [ReadSlice(region.handle(), 0, into)]
    await peer.read(slices, timeout_s=60)
    fabric.down.add("fake1")
    fabric.moved.clear()
    into[:] = bytes(8 * MIB)
    await peer.read(slices, timeout_s=60)
    assert into == region.view
    assert fabric.moved == {"fake0": 8 * MIB}
    fabric.down.clear()
    places = [memoryview(bytearray(8 * MIB)) for _ in range(4)]
    async with asyncio.timeout(30):
        while "fake1" not in fabric.moved:
            for transfer in [
                peer.read([ReadSlice(region.handle(), 0, place)], timeout_s=60)
                for place in places
            ]:
                await transfer


async def test_memory_takes_the_near_device(owner: Endpoint, fabric: Fabric) -> None:
    topology = Topology(
        {
            "cpu:0": Near(("fake0",), ("fake1",)),
            "cpu:1": Near(("fake1",), ("fake0",)),
        }
    )
    # too small to measure a device by: only the penalty tells them apart
    size = 16 << 10
    region = owner.register(os.urandom(size), name="arena")
    async with make("reader", fabric, topology=topology, location="cpu:0") as reader:
        peer = await reader.connect(owner.address)
        far = reader.allocate(size, name="far", location="cpu:1")
        here = memoryview(bytearray(size))
        for into, near in ((here, "fake0"), (far.view, "fake1"), (here, "fake0")):
            fabric.moved.clear()
            for _ in range(5):
                await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=60)
            assert into == region.view
            assert fabric.moved == {near: 5 * size}


async def test_who_comes_with_an_address_of_before_is_told_the_ways_of_now() -> None:
    cards = ["127.0.0.1"]
    async with owner_on(cards) as owner, reader_by_tcp() as reader:
        before = owner.address
        cards[:] = ["127.0.0.3"]
        await asyncio.to_thread(owner.look_again)
        peer = await reader.connect(before)
        await until_ways(peer, "127.0.0.3")


async def test_without_any_way_the_deadline_ends_it() -> None:
    cards = ["127.0.0.1"]
    async with (
        owner_on(cards) as owner,
        reader_by_tcp() as reader,
    ):
        region = owner.register(b"bytes", name="arena")
        peer = await reader.connect(owner.address)
        # an address that leads nowhere
        cards[:] = ["127.0.0.1:0"]
        await asyncio.to_thread(owner.look_again)
        await until_ways(peer, "127.0.0.1:0")
        into = memoryview(bytearray(5))
        with pytest.raises(TimedOut):
            await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=0.3)
        cards[:] = ["127.0.0.3"]
        await asyncio.to_thread(owner.look_again)
        await until_ways(peer, "127.0.0.3")
        await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=10)
        assert bytes(into) == b"bytes"
