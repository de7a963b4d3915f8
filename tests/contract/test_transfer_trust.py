"""Who may do what, and who is gone: the same for every transport."""

# ruff: noqa: PT012, ASYNC110 - conditions are polled with a deadline

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.contract.transfer_world import (
    MIB,
    TRANSPORTS,
    Pair,
    World,
    make_pair,
    open_world,
    pattern,
)

from kvtide.transfer import (
    Access,
    AccessDenied,
    ReadSlice,
    Refused,
    StaleEpoch,
    Unreachable,
    WriteSlice,
)


@pytest.fixture(params=TRANSPORTS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with open_world(request.param) as world:
        yield world


@pytest.fixture
async def pair(world: World) -> Pair:
    return await make_pair(world)


async def test_read_only_memory_gives_no_write_handle(pair: Pair) -> None:
    region = pair.owner.register(b"constant", name="constant")
    with pytest.raises(AccessDenied):
        region.handle(Access.WRITE)


async def test_write_needs_a_write_handle(pair: Pair) -> None:
    peer = await pair.peer()
    before = bytes(pair.region.view)
    slices = [
        WriteSlice(pair.region.handle(Access.WRITE), 100, memoryview(b"xx")),
        WriteSlice(pair.region.handle(), 0, memoryview(b"xx")),
    ]
    with pytest.raises(AccessDenied) as caught:
        await peer.write(slices[1:], timeout_s=5)
    assert caught.value.slice_index == 0
    assert caught.value.node == "owner"
    with pytest.raises(AccessDenied) as caught:
        await peer.write(slices, timeout_s=5)
    assert caught.value.slice_index == 1
    assert bytes(pair.region.view[:100]) == before[:100]


async def test_forged_and_foreign_capabilities(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle()
    other = pair.owner.allocate(4096, name="other")
    into = memoryview(bytearray(16))
    flipped = bytes([*handle.capability[:-1], handle.capability[-1] ^ 1])
    raised = bytes([Access.WRITE, *handle.capability[1:]])
    for wrong in (
        replace(handle, capability=flipped),
        replace(handle, capability=bytes(25)),
        replace(handle, capability=b""),
        replace(handle, region=other.number, length=4096),
        replace(handle, region=12345),
        replace(handle, capability=raised),
    ):
        with pytest.raises(AccessDenied):
            await peer.read([ReadSlice(wrong, 0, into)], timeout_s=5)
    with pytest.raises(AccessDenied):
        await peer.write(
            [WriteSlice(replace(handle, capability=raised), 0, into)], timeout_s=5
        )
    assert bytes(into) == bytes(16)


async def test_expired_capability(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle(ttl_s=0.02)
    into = memoryview(bytearray(16))
    async with asyncio.timeout(40):
        with pytest.raises(AccessDenied, match="expired"):
            while True:
                await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
                await asyncio.sleep(0.005)
    await peer.read([ReadSlice(pair.region.handle(ttl_s=60), 0, into)], timeout_s=5)


async def test_handle_of_another_node_or_epoch(pair: Pair) -> None:
    peer = await pair.peer()
    into = memoryview(bytearray(8))
    handle = pair.region.handle()
    with pytest.raises(StaleEpoch):
        peer.read([ReadSlice(replace(handle, epoch=0), 0, into)], timeout_s=5)
    with pytest.raises(AccessDenied):
        peer.read([ReadSlice(replace(handle, node="x"), 0, into)], timeout_s=5)


async def test_connect_is_cached(pair: Pair) -> None:
    assert await pair.peer() is await pair.peer()


async def test_connect_to_another_epoch(world: World) -> None:
    owner = await world.endpoint("owner", epoch=7)
    reader = await world.endpoint("reader")
    with pytest.raises(StaleEpoch):
        await reader.connect(replace(owner.address, epoch=6))
    with pytest.raises(StaleEpoch):
        await reader.connect(replace(owner.address, epoch=8))


async def test_stale_client_is_refused(world: World) -> None:
    owner = await world.endpoint("owner")
    newer = await world.endpoint("reader", epoch=2)
    await newer.connect(owner.address)
    older = await world.endpoint("reader", epoch=1)
    with pytest.raises(StaleEpoch):
        await older.connect(owner.address)


async def test_newer_client_fences_the_older(world: World) -> None:
    owner = await world.endpoint("owner")
    gone: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    owner.on_peer_gone(lambda node, epoch: gone.put_nowait((node, epoch)))
    older = await world.endpoint("reader", epoch=1)
    await older.connect(owner.address)
    newer = await world.endpoint("reader", epoch=2)
    await newer.connect(owner.address)
    async with asyncio.timeout(40):
        assert await gone.get() == ("reader", 1)


async def test_connect_to_another_node_or_protocol(world: World) -> None:
    owner = await world.endpoint("owner")
    reader = await world.endpoint("reader")
    with pytest.raises(Refused):
        await reader.connect(replace(owner.address, node="other"))
    with pytest.raises(Refused, match="protocol"):
        await reader.connect(replace(owner.address, protocol=999))


async def test_another_secret(world: World) -> None:
    owner = await world.endpoint("owner")
    reader = await world.endpoint("reader", secret=b"not the secret of the cluster")
    with pytest.raises(Refused):
        await reader.connect(owner.address)


async def test_owner_closes(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle()
    address = pair.owner.address
    into = memoryview(bytearray(8))
    await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
    await pair.owner.close()
    async with asyncio.timeout(40):
        while not peer.gone:
            await asyncio.sleep(0.005)
    with pytest.raises(Unreachable):
        await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
    with pytest.raises(Unreachable):
        await pair.reader.connect(address)


async def test_owner_hears_that_a_reader_is_gone(pair: Pair) -> None:
    gone: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    pair.owner.on_peer_gone(lambda node, epoch: gone.put_nowait((node, epoch)))
    peer = await pair.peer()
    into = memoryview(bytearray(8))
    await peer.read([ReadSlice(pair.region.handle(), 0, into)], timeout_s=5)
    assert gone.empty()
    await pair.reader.close()
    async with asyncio.timeout(40):
        assert await gone.get() == ("reader", 1)


async def test_own_close_ends_use(pair: Pair) -> None:
    peer = await pair.peer()
    await pair.reader.close()
    into = memoryview(bytearray(8))
    with pytest.raises(Unreachable):
        await peer.read([ReadSlice(pair.region.handle(), 0, into)], timeout_s=5)
    with pytest.raises(Unreachable):
        await pair.reader.connect(pair.owner.address)


async def test_a_peer_that_was_closed_is_left_and_comes_anew(pair: Pair) -> None:
    gone: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    pair.owner.on_peer_gone(lambda node, epoch: gone.put_nowait((node, epoch)))
    peer = await pair.peer()
    into = memoryview(bytearray(10))
    slices = [ReadSlice(pair.region.handle(), 0, into)]
    await peer.read(slices, timeout_s=10)
    await asyncio.to_thread(peer.close)
    assert peer.gone
    async with asyncio.timeout(40):
        assert await gone.get() == ("reader", 1)
    with pytest.raises(Unreachable):
        await peer.read(slices, timeout_s=10)
    again = await pair.peer()
    assert again is not peer
    await again.read(slices, timeout_s=10)
    assert bytes(into) == pattern(10)


async def test_deregister(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle()
    into = memoryview(bytearray(8))
    await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
    await pair.owner.deregister(pair.region)
    # over shared memory the news takes a moment, and old memory is not reused
    async with asyncio.timeout(40):
        with pytest.raises(AccessDenied, match="gone"):
            while True:
                await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
                await asyncio.sleep(0.001)
    assert bytes(pair.region.view[:8]) == pattern(8)


async def test_map(pair: Pair) -> None:
    peer = await pair.peer()
    if not pair.world.mappable:
        with pytest.raises(Refused):
            await peer.map_async(pair.region.handle())
        return
    view = await peer.map_async(pair.region.handle())
    assert view.readonly
    assert bytes(view) == pattern(MIB)
    writable = await peer.map_async(pair.region.handle(Access.WRITE))
    writable[3:6] = b"new"
    assert bytes(pair.region.view[:8]) == pattern(3) + b"new" + pattern(8)[6:]
    assert bytes(view[3:6]) == b"new"
    with pytest.raises(AccessDenied):
        await peer.map_async(replace(pair.region.handle(), capability=bytes(25)))
