"""What every transport of the transfer library must do, whatever carries the bytes."""

import array
import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st
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
    OutOfBounds,
    Priority,
    ReadSlice,
    Transfer,
    TransferError,
    WriteSlice,
)


@pytest.fixture(params=TRANSPORTS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with open_world(request.param) as world:
        yield world


@pytest.fixture
async def pair(world: World) -> Pair:
    return await make_pair(world)


async def test_read_one(pair: Pair) -> None:
    peer = await pair.peer()
    into = bytearray(1000)
    slices = [ReadSlice(pair.region.handle(), 77, memoryview(into))]

    result = await peer.read(slices, timeout_s=5)

    assert bytes(into) == pattern(MIB)[77:1077]
    assert result.xxh3 == (xxhash.xxh3_64_intdigest(into),)
    assert result.bytes == 1000
    assert peer.path == pair.world.path
    moved_by = {"private": "tcp", "file": "file"}
    assert result.path == moved_by.get(pair.world.transport, pair.world.path)


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
        async with open_world(transport) as world:
            pair = await make_pair(world)
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


async def test_a_message_rides_with_a_transfer(pair: Pair) -> None:
    heard: asyncio.Queue[tuple[str, int, bytes]] = asyncio.Queue()
    pair.owner.on_notification(
        lambda node, epoch, message: heard.put_nowait((node, epoch, message))
    )
    peer = await pair.peer()
    into = memoryview(bytearray(1000))
    read = [ReadSlice(pair.region.handle(), 0, into)]
    write = [WriteSlice(pair.region.handle(Access.WRITE), 0, into)]
    await peer.read(read, timeout_s=5, notify=b"read")
    async with asyncio.timeout(40):
        assert await heard.get() == ("reader", 1, b"read")
        await peer.write(write, timeout_s=5, notify=b"written")
        assert await heard.get() == ("reader", 1, b"written")
        await peer.read([], timeout_s=5, notify=b"alone")
        assert await heard.get() == ("reader", 1, b"alone")
        denied = [WriteSlice(pair.region.handle(), 0, into)]
        with pytest.raises(AccessDenied):
            await peer.write(denied, timeout_s=5, notify=b"never")
        await peer.read(read, timeout_s=5, notify=b"last")
        assert await heard.get() == ("reader", 1, b"last")
    with pytest.raises(OutOfBounds):
        peer.read(read, timeout_s=5, notify=bytes(70_000))
