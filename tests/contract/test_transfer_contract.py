"""What every transport of the transfer library must do, whatever carries the bytes."""

# ruff: noqa: S108, PT012, ASYNC110 - conditions are polled with a deadline

import array
import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    AccessDenied,
    Endpoint,
    MemoryFabric,
    OutOfBounds,
    Priority,
    ReadSlice,
    Refused,
    StaleEpoch,
    Transfer,
    TransferEndpoint,
    TransferError,
    TransferPeer,
    Unreachable,
    WriteSlice,
)
from kvtide.transfer.verbs import device_names

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20


def rdma_devices() -> list[str]:
    try:
        return device_names()
    except Refused:
        return []


RDMA = pytest.param(
    "rdma",
    marks=[
        pytest.mark.rdma,
        pytest.mark.timeout(300),
        pytest.mark.skipif(not rdma_devices(), reason="no RDMA device"),
    ],
)
TRANSPORTS = ("memory", "shm", "tcp", "private", RDMA)
Make = Callable[..., TransferEndpoint]


class World:
    """Makes endpoints that reach each other by one transport."""

    def __init__(self, transport: str, stack: AsyncExitStack) -> None:
        self.transport = transport
        self._stack = stack
        self._fabric = MemoryFabric(SystemClock())

    @property
    def path(self) -> str:
        """What the peers must say."""
        return "shm" if self.transport == "private" else self.transport

    @property
    def mappable(self) -> bool:
        return self.transport in ("memory", "shm")

    async def endpoint(
        self, node: str, epoch: int = 1, secret: bytes = SECRET
    ) -> TransferEndpoint:
        return await self._stack.enter_async_context(
            self.make(node=node, epoch=epoch, secret=secret)
        )

    def make(self, *, node: str, epoch: int, secret: bytes) -> TransferEndpoint:
        if self.transport == "memory":
            return self._fabric.endpoint(node=node, epoch=epoch, secret=secret)
        shm_dir = None if self.transport in ("tcp", "rdma") else Path("/dev/shm")
        return Endpoint(
            node=node,
            epoch=epoch,
            secret=secret,
            clock=SystemClock(),
            shm_dir=shm_dir,
            rdma_devices=None if self.transport == "rdma" else (),
        )


class Pair:
    """An owner with a region full of known bytes, and a reader."""

    def __init__(
        self, world: World, owner: TransferEndpoint, reader: TransferEndpoint
    ) -> None:
        self.world = world
        self.owner = owner
        self.reader = reader
        if world.transport == "private":
            # registered memory has no name that others could map
            self.region = owner.register(bytearray(MIB), name="arena")
        else:
            self.region = owner.allocate(MIB, name="arena")
        self.region.view[:] = pattern(MIB)

    async def peer(self) -> TransferPeer:
        return await self.reader.connect(self.owner.address)


def pattern(size: int, seed: int = 1) -> bytes:
    block = b"".join(
        xxhash.xxh3_64_digest(index.to_bytes(4, "little"), seed=seed)
        for index in range(512)
    )
    return (block * (size // len(block) + 1))[:size]


@pytest.fixture(params=TRANSPORTS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(request.param, stack)


@pytest.fixture
async def pair(world: World) -> Pair:
    return Pair(world, await world.endpoint("owner"), await world.endpoint("reader"))


async def test_read_one(pair: Pair) -> None:
    peer = await pair.peer()
    into = bytearray(1000)
    slices = [ReadSlice(pair.region.handle(), 77, memoryview(into))]

    result = await peer.read(slices, timeout_s=5)

    assert bytes(into) == pattern(MIB)[77:1077]
    assert result.xxh3 == (xxhash.xxh3_64_intdigest(into),)
    assert result.bytes == 1000
    assert peer.path == pair.world.path
    if pair.world.transport != "private":
        assert result.path == pair.world.path
    else:
        assert result.path == "tcp"


@pytest.mark.parametrize("size", [0, 1, 4096, 256 * 1024, 256 * 1024 + 1, MIB])
async def test_read_sizes(pair: Pair, size: int) -> None:
    peer = await pair.peer()
    into = memoryview(bytearray(size))
    offset = MIB - size

    result = await peer.read(
        [ReadSlice(pair.region.handle(), offset, into)], timeout_s=5
    )

    assert bytes(into) == pattern(MIB)[offset:]
    assert result.xxh3 == (xxhash.xxh3_64_intdigest(into),)


async def test_empty_batch(pair: Pair) -> None:
    peer = await pair.peer()
    result = await peer.read([], timeout_s=5)
    assert result.xxh3 == ()
    assert result.bytes == 0


async def test_scatter(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle()
    places = [bytearray(5000 + index) for index in range(600)]
    slices = [
        ReadSlice(handle, 1500 * index, memoryview(place))
        for index, place in enumerate(places)
    ]

    result = await peer.read(slices, timeout_s=5)

    whole = pattern(MIB)
    for index, place in enumerate(places):
        assert place == whole[1500 * index :][: 5000 + index]
        assert result.xxh3[index] == xxhash.xxh3_64_intdigest(place)


async def test_read_into_typed_memory(pair: Pair) -> None:
    peer = await pair.peer()
    into = array.array("d", bytes(8 * 100))
    await peer.read([ReadSlice(pair.region.handle(), 8, memoryview(into))], timeout_s=5)
    assert into.tobytes() == pattern(MIB)[8:808]


async def test_read_several_regions(pair: Pair) -> None:
    peer = await pair.peer()
    other = pair.owner.register(pattern(3000, seed=2), name="readonly")
    into = memoryview(bytearray(4000))
    slices = [
        ReadSlice(pair.region.handle(), 0, into[:1000]),
        ReadSlice(other.handle(), 0, into[1000:]),
    ]
    await peer.read(slices, timeout_s=5)
    assert bytes(into) == pattern(1000) + pattern(3000, seed=2)


async def test_write(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle(Access.WRITE)
    sources = [pattern(1000, seed=3), pattern(300_000, seed=4)]

    result = await peer.write(
        [
            WriteSlice(handle, 0, memoryview(sources[0])),
            WriteSlice(handle, 5000, memoryview(sources[1])),
        ],
        timeout_s=5,
    )

    assert bytes(pair.region.view[:1000]) == sources[0]
    assert bytes(pair.region.view[1000:5000]) == pattern(MIB)[1000:5000]
    assert bytes(pair.region.view[5000:305_000]) == sources[1]
    assert result.xxh3 == tuple(map(xxhash.xxh3_64_intdigest, sources))


async def test_write_handle_reads_too(pair: Pair) -> None:
    peer = await pair.peer()
    into = memoryview(bytearray(10))
    await peer.read([ReadSlice(pair.region.handle(Access.WRITE), 0, into)], timeout_s=5)
    assert bytes(into) == pattern(10)


async def test_reads_and_writes_at_once(pair: Pair) -> None:
    peer = await pair.peer()
    target = pair.owner.register(bytearray(8 * MIB), name="target")
    write, read = target.handle(Access.WRITE), pair.region.handle()
    source = memoryview(pattern(4 * MIB, seed=5))
    intos = [bytearray(MIB) for _ in range(8)]
    transfers: list[Transfer] = []
    for index, into in enumerate(intos):
        transfers.append(
            peer.read([ReadSlice(read, 0, memoryview(into))], timeout_s=20)
        )
        part = source[index * MIB // 2 :][: MIB // 2]
        transfers.append(
            peer.write([WriteSlice(write, index * MIB // 2, part)], timeout_s=20)
        )
    for transfer in transfers:
        await transfer
    assert all(into == pattern(MIB) for into in intos)
    assert target.view[: 4 * MIB] == source


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
    async with asyncio.timeout(10):
        with pytest.raises(AccessDenied, match="expired"):
            while True:
                await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
                await asyncio.sleep(0.005)
    await peer.read([ReadSlice(pair.region.handle(ttl_s=60), 0, into)], timeout_s=5)


async def test_bounds(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle()
    into = memoryview(bytearray(100))
    for offset in (-1, MIB - 99, MIB, MIB + 1, 1 << 62):
        with pytest.raises(OutOfBounds) as caught:
            await peer.read([ReadSlice(handle, offset, into)], timeout_s=5)
        assert caught.value.slice_index == 0


async def test_bounds_are_the_owners(pair: Pair) -> None:
    """A handle whose length was changed gives no more than the region."""
    peer = await pair.peer()
    handle = replace(pair.region.handle(), length=1 << 40)
    into = memoryview(bytearray(100))
    with pytest.raises(OutOfBounds) as caught:
        await peer.read([ReadSlice(handle, MIB - 50, into)], timeout_s=5)
    assert caught.value.slice_index == 0
    await peer.read([ReadSlice(handle, MIB - 100, into)], timeout_s=5)


async def test_overlapping_targets(pair: Pair) -> None:
    peer = await pair.peer()
    into = memoryview(bytearray(100))
    handle = pair.region.handle()
    slices = [ReadSlice(handle, 0, into[:60]), ReadSlice(handle, 0, into[59:])]
    with pytest.raises(OutOfBounds, match="overlap"):
        peer.read(slices, timeout_s=5)


async def test_unusable_targets(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle()
    for bad in (memoryview(bytes(8)), memoryview(bytearray(16))[::2]):
        with pytest.raises(OutOfBounds) as caught:
            peer.read([ReadSlice(handle, 0, bad)], timeout_s=5)
        assert caught.value.slice_index == 0


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
    async with asyncio.timeout(10):
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
    async with asyncio.timeout(10):
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
    async with asyncio.timeout(10):
        assert await gone.get() == ("reader", 1)


async def test_own_close_ends_use(pair: Pair) -> None:
    peer = await pair.peer()
    await pair.reader.close()
    into = memoryview(bytearray(8))
    with pytest.raises(Unreachable):
        await peer.read([ReadSlice(pair.region.handle(), 0, into)], timeout_s=5)
    with pytest.raises(Unreachable):
        await pair.reader.connect(pair.owner.address)


async def test_deregister(pair: Pair) -> None:
    peer = await pair.peer()
    handle = pair.region.handle()
    into = memoryview(bytearray(8))
    await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
    await pair.owner.deregister(pair.region)
    # over shared memory the news takes a moment, and old memory is not reused
    async with asyncio.timeout(10):
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


async def test_blocking_use(pair: Pair) -> None:
    into = memoryview(bytearray(1000))
    handle = pair.region.handle()
    errors: list[BaseException] = []
    digests: list[tuple[int, ...]] = []

    def work() -> None:
        try:
            peer = pair.reader.connect_blocking(pair.owner.address)
            transfer = peer.read([ReadSlice(handle, 5, into)], timeout_s=5)
            digests.append(transfer.wait_blocking().xxh3)
            assert transfer.done()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert errors == []
    assert digests == [(xxhash.xxh3_64_intdigest(pattern(MIB)[5:1005]),)]


async def test_cancel(pair: Pair) -> None:
    """However a cancel and a transfer meet, it ends once, and the peer goes on."""
    peer = await pair.peer()
    handle = pair.region.handle()
    into = memoryview(bytearray(MIB))
    kinds: set[str] = set()
    for _ in range(20):
        transfer = peer.read(
            [ReadSlice(handle, 0, into)], timeout_s=5, priority=Priority.BACKGROUND
        )
        transfer.cancel()
        try:
            result = await transfer
        except TransferError as error:
            kinds.add(error.kind)
        else:
            assert result.bytes == MIB
        assert transfer.done()
    assert kinds <= {"cancelled"}
    await peer.read([ReadSlice(handle, 0, into)], timeout_s=5)
    assert bytes(into) == pattern(MIB)


async def test_cancelled_task(pair: Pair) -> None:
    peer = await pair.peer()
    into = memoryview(bytearray(MIB))
    transfer = peer.read([ReadSlice(pair.region.handle(), 0, into)], timeout_s=5)

    async def wait() -> None:
        await transfer

    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
    assert transfer.done()


async def test_result_before_the_end_is_an_error(world: World) -> None:
    owner, reader = await world.endpoint("owner"), await world.endpoint("reader")
    region = owner.allocate(64 * MIB, name="large")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(64 * MIB))
    transfer = peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=30)
    if not transfer.done():
        with pytest.raises(RuntimeError):
            transfer.result()
    await transfer
    assert transfer.result().bytes == 64 * MIB


async def test_allocated_memory_is_zero(pair: Pair) -> None:
    region = pair.owner.allocate(10_000, name="zero")
    assert bytes(region.view) == bytes(10_000)
    with pytest.raises(OutOfBounds):
        pair.owner.allocate(0, name="nothing")


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_batch(transport: str, data: st.DataObject) -> None:
    """Any sizes and offsets: every byte is right, and no other is touched."""
    ranges = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, MIB - 1), st.integers(0, 300_000), st.integers(0, 9)
            ),
            max_size=20,
        )
    )

    async def run() -> None:
        async with AsyncExitStack() as stack:
            world = World(transport, stack)
            pair = Pair(
                world, await world.endpoint("owner"), await world.endpoint("reader")
            )
            peer = await pair.peer()
            whole = pattern(MIB)
            arena = bytearray(sum(min(n, MIB - o) + g for o, n, g in ranges))
            expected = bytearray(len(arena))
            slices: list[ReadSlice] = []
            at = 0
            for offset, length, gap in ranges:
                size = min(length, MIB - offset)
                into = memoryview(arena)[at : at + size]
                slices.append(ReadSlice(pair.region.handle(), offset, into))
                expected[at : at + size] = whole[offset : offset + size]
                at += size + gap
            result = await peer.read(slices, timeout_s=10)
            assert arena == expected
            assert result.xxh3 == tuple(
                xxhash.xxh3_64_intdigest(each.into) for each in slices
            )

    asyncio.run(run())
