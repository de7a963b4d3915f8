"""Writes by RDMA are compared and fenced, and keys die with the rights that gave them."""

# ruff: noqa: ASYNC110 - conditions are polled with a deadline

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from tests.integration.transfer_fake_rdma import Fabric
from tests.integration.transfer_proxy import CLOCK, MIB, SECRET, Notes

from kvtide.transfer import (
    Access,
    AccessDenied,
    Endpoint,
    ReadSlice,
    SocketPeer,
    Unreachable,
    WriteSlice,
    rdma_owner,
)


class Cluster:
    """An owner and a writer with devices that are made up."""

    def __init__(self, fabric: Fabric, stack: AsyncExitStack) -> None:
        self.fabric = fabric
        self.notes = Notes()
        self._stack = stack

    async def start(self) -> SocketPeer:
        self.owner = await self._stack.enter_async_context(self._make("owner"))
        writer = await self._stack.enter_async_context(self._make("writer"))
        self.peer = await writer.connect(self.owner.address)
        return self.peer

    def _make(self, node: str) -> Endpoint:
        return Endpoint(
            node=node,
            epoch=1,
            secret=SECRET,
            clock=CLOCK,
            shm_dir=None,
            rdma_devices=None,
            system=self.fabric.system(),
            observer=self.notes,
        )


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(Fabric(["fake0", "fake1"]), stack)


async def test_what_arrives_changed_is_found_and_written_again(
    cluster: Cluster,
) -> None:
    peer = await cluster.start()
    region = cluster.owner.register(bytearray(2 * MIB), name="arena")
    news = memoryview(b"n" * MIB)
    slices = [
        WriteSlice(region.handle(Access.WRITE), 0, news[:1000]),
        WriteSlice(region.handle(Access.WRITE), MIB, news[1000:]),
    ]
    cluster.fabric.spoil = 1
    result = await peer.write(slices, timeout_s=20)
    assert result.path == "rdma"
    assert region.view[:1000] == news[:1000]
    assert region.view[MIB : 2 * MIB - 1000] == news[1000:]
    assert cluster.notes.retries == ["corrupt"]
    # a device that goes on like that is left
    cluster.fabric.spoil = 1 << 20
    region.view[:] = bytes(2 * MIB)
    result = await peer.write(slices, timeout_s=20)
    assert result.path == "tcp"
    assert region.view[:1000] == news[:1000]
    assert set(cluster.notes.retries[1:]) == {"corrupt"}


@pytest.mark.parametrize("by_device", [False, True], ids=["tcp", "the other device"])
async def test_a_write_that_is_tried_elsewhere_does_not_come_late(
    cluster: Cluster, by_device: bool
) -> None:
    if not by_device:
        cluster.fabric.there.remove("fake1")
    peer = await cluster.start()
    size = 4096
    region = cluster.owner.register(bytearray(size), name="arena")
    handle = region.handle(Access.WRITE)
    await peer.write([WriteSlice(handle, 0, memoryview(b"0" * size))], timeout_s=20)
    cluster.fabric.late = []
    old = peer.write([WriteSlice(handle, 0, memoryview(b"1" * size))], timeout_s=20)
    async with asyncio.timeout(20):
        while not cluster.notes.retries:
            await asyncio.sleep(0.001)
    late, cluster.fabric.late = cluster.fabric.late, None
    await old
    assert bytes(region.view) == b"1" * size
    await peer.write([WriteSlice(handle, 0, memoryview(b"2" * size))], timeout_s=20)
    cluster.fabric.late = late
    assert cluster.fabric.deliver() == 0
    assert bytes(region.view) == b"2" * size


async def test_a_write_that_was_cut_by_tcp_is_left_before_one_by_rdma(
    cluster: Cluster,
) -> None:
    cluster.fabric.down.update(cluster.fabric.there)
    peer = await cluster.start()
    region = cluster.owner.register(bytearray(MIB), name="arena")
    slices = [WriteSlice(region.handle(Access.WRITE), 0, memoryview(bytes(MIB)))]
    assert (await peer.write(slices, timeout_s=20)).path == "tcp"
    given_up = vars(peer)["_dialer"].given_up
    given_up.add(b"a lane of 16 byt")
    cluster.fabric.down.clear()
    async with asyncio.timeout(30):
        while (await peer.write(slices, timeout_s=20)).path != "rdma":
            # the rail's pause has to end
            given_up.add(b"a lane of 16 byt")
            await asyncio.sleep(0.01)
    assert given_up.lanes() == ()
    assert not vars(cluster.owner)["_server"]._shut.enter(
        b"a lane of 16 byt", lambda: None
    )


async def test_keys_of_a_right_that_ends_end_with_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_owner, "GRACE_S", 0.0)
    peer = await cluster.start()
    region = cluster.owner.register(bytearray(MIB), name="arena")
    into = memoryview(bytearray(MIB))
    ends = region.handle(ttl_s=0.5)
    await peer.read([ReadSlice(ends, 0, into)], timeout_s=20)
    stays = region.handle()
    await peer.read([ReadSlice(stays, 0, into)], timeout_s=20)

    def keys() -> int:
        return sum(each.remote == "read" for each in cluster.fabric.memories.values())

    # for each device one of the right that ends, one of all that do not
    assert keys() == 4
    async with asyncio.timeout(20):
        while keys() > 2:
            await asyncio.sleep(0.01)
    with pytest.raises(AccessDenied, match="expired"):
        await peer.read([ReadSlice(ends, 0, into)], timeout_s=20)
    result = await peer.read([ReadSlice(stays, 0, into)], timeout_s=20)
    assert result.path == "rdma"
    await cluster.owner.deregister(region)
    assert keys() == 0


async def test_what_no_device_takes_goes_by_tcp_and_harms_no_rail(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await cluster.start()
    good = cluster.owner.register(os.urandom(4 * MIB), name="good")
    into = memoryview(bytearray(4 * MIB))
    await peer.read([ReadSlice(good.handle(), 0, into)], timeout_s=20)
    cluster.fabric.refuses = True
    other = cluster.owner.register(os.urandom(4 * MIB), name="other")
    for _ in range(3):
        result = await peer.read([ReadSlice(other.handle(), 0, into)], timeout_s=20)
        assert (result.path, into == other.view) == ("tcp", True)
    # no retry was spent, and no rail is paused
    assert cluster.notes.retries == []
    assert [rail.failures for rail in peer.rails()] == [0] * len(peer.rails())
    result = await peer.read([ReadSlice(good.handle(), 0, into)], timeout_s=20)
    assert result.path == "rdma"
    lines = [
        each.getMessage()
        for each in caplog.records
        if each.levelno == logging.WARNING and "by the network" in each.getMessage()
    ]
    assert len(lines) == 1
    assert "cannot register" in lines[0]


async def test_too_many_rights_that_end_go_by_tcp(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_owner, "MOST_ENDING", 3)
    peer = await cluster.start()
    into = memoryview(bytearray(1000))
    paths: list[str] = []
    for number in range(5):
        region = cluster.owner.register(bytearray(1000), name="blob")
        handle = region.handle(ttl_s=100 + number)
        result = await peer.read([ReadSlice(handle, 0, into)], timeout_s=20)
        paths.append(result.path)
    assert paths == ["rdma"] * 3 + ["tcp"] * 2


async def test_an_owner_that_goes_while_it_is_asked_ends_the_write(
    cluster: Cluster,
) -> None:
    peer = await cluster.start()
    region = cluster.owner.register(bytearray(MIB), name="arena")
    handle = region.handle(Access.WRITE)
    source = memoryview(bytes(MIB))
    await peer.write([WriteSlice(handle, 0, source)], timeout_s=20)
    transfers = [
        peer.write([WriteSlice(handle, 0, source)], timeout_s=20) for _ in range(8)
    ]
    await cluster.owner.close()
    for transfer in transfers:
        try:
            await transfer
        except (Unreachable, AccessDenied):
            continue
    assert all(transfer.done() for transfer in transfers)
