"""Store and client together: puts, gossip, reads, corruption, restarts, leases."""

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.nats_server import NatsServer, nats_server
from tests.integration.pool_world import (
    LAYOUT,
    SPACE,
    Memory,
    World,
    keys,
    part_bytes,
    until,
    world,
    write,
)

from kvtide.bus import Hop
from kvtide.bus.messages import (
    BlockState,
    Failure,
    PutBegin,
    PutBlock,
    PutGranted,
    StoreLoad,
)
from kvtide.kv import Located, NodeId, NodeRef, Role
from kvtide.pool import MissReason, PartRead, PoolUnavailable, PutClosed
from kvtide.store.shell import StoreService

TIGHT = LAYOUT.slot_bytes * 4


@pytest.fixture(scope="module")
def server() -> Generator[NatsServer]:
    with nats_server() as started:
        yield started


@pytest.fixture
async def here(tmp_path: Path, server: NatsServer) -> AsyncGenerator[World]:
    async with world(tmp_path, server.url) as made:
        yield made


def load(store: StoreService) -> StoreLoad:
    assert store.machine is not None
    return store.machine.load()


def idle(store: StoreService) -> bool:
    now = load(store)
    return not (now.reserved_slots or now.quarantined_slots or now.leases or now.pins)


def arena(store: StoreService) -> memoryview:
    """The bytes themselves, to spoil them."""
    held = store._arena  # pyright: ignore[reportPrivateUsage]
    assert held is not None
    return held.view


# ---- puts and reads


@pytest.mark.parametrize(("host", "path"), [("host-0", "shm"), ("host-1", "tcp")])
async def test_a_put_is_told_and_read(here: World, host: str, path: str) -> None:
    store = await here.store()
    writer = await here.linked_worker("writer")
    reader = await here.worker("reader", host)
    chain = keys(3)
    assert await writer.store_blocks(chain) == (BlockState.STORED,) * 3
    memory = Memory()
    outcomes = await reader.read(await reader.located(chain), memory)
    assert [(outcome.miss, outcome.path) for outcome in outcomes] == [(None, path)] * 3
    assert all(memory.holds(i, key) for i, key in enumerate(chain))
    assert (
        reader.count("kvtide_pool_read_bytes_total", purpose="reuse", path=path)
        == 3 * LAYOUT.parts * LAYOUT.part_bytes
    )
    await until(lambda: idle(store), "the lease has ended")


async def test_a_layer_is_read_and_verified_alone(here: World) -> None:
    await here.store()
    worker = await here.linked_worker()
    chain = keys(2)
    await worker.store_blocks(chain)
    located = await worker.located(chain)
    headers = await worker.pool.read_headers(located, SPACE.tags, LAYOUT, timeout_s=5.0)
    memory = [bytearray(LAYOUT.part_bytes) for _ in chain]
    reads = [
        PartRead(copy.slot, 3, header.parts[3].xxh3, memoryview(into), copy)
        for copy, header, into in zip(located, headers, memory, strict=True)
        if header is not None
    ]
    outcomes = await worker.pool.read_parts(reads, LAYOUT, timeout_s=5.0)
    assert [outcome.ok for outcome in outcomes] == [True, True]
    assert [bytes(each) for each in memory] == [part_bytes(key, 3) for key in chain]


async def test_what_exists_is_pinned_and_not_written_again(here: World) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    chain = keys(2)
    await worker.store_blocks(chain)
    put = await worker.begin(chain, "again")
    assert [put.writable(i) for i in range(2)] == [False, False]
    assert [put.ref(i) for i in range(2)] == [
        copy.slot for copy in await worker.located(chain)
    ]
    memory = bytearray(LAYOUT.part_bytes)
    sums, ref = put.sums(1), put.ref(1)
    assert sums is not None
    assert ref is not None
    read = PartRead(ref, 2, sums[2], memoryview(memory))
    assert (await worker.pool.read_parts([read], LAYOUT, timeout_s=5))[0].ok
    assert bytes(memory) == part_bytes(chain[1], 2)
    assert await put.commit() == (None, None)
    assert load(store).pins == 2
    await put.release()
    await until(lambda: idle(store), "the pins have ended")


async def test_a_block_put_twice_at_once_is_stored_once(here: World) -> None:
    store = await here.store()
    first, second = await here.linked_worker("a"), await here.linked_worker("b")
    chain = keys(1)
    puts = [await first.begin(chain), await second.begin(chain)]
    for put in puts:
        write(put, chain)
    states = [await put.commit() for put in puts]
    assert states == [(BlockState.STORED,), (BlockState.DUPLICATE,)]
    assert load(store).used_slots == 2
    for put in puts:
        await put.release()
    await until(lambda: load(store).used_slots == 1, "the second copy is gone")
    assert (await first.located(chain))[0].slot == puts[0].ref(0)


async def test_a_private_block_lives_as_long_as_its_lease(here: World) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    put = await worker.begin([None])
    write(put, [None])
    ref, sums = put.ref(0), put.sums(0)
    assert ref is not None
    assert sums is not None
    # a hand-over reads parts before anything is committed
    memory = bytearray(LAYOUT.part_bytes)
    read = PartRead(ref, 1, sums[1], memoryview(memory))
    assert (await worker.pool.read_parts([read], LAYOUT, timeout_s=5))[0].ok
    assert await put.commit() == (BlockState.STORED,)
    assert load(store).used_slots == 1
    assert not worker.index.located
    await put.release()
    await until(lambda: load(store).used_slots == 0, "it died with its lease")


async def test_an_unfinished_block_is_not_committed(here: World) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    chain = keys(2)
    put = await worker.begin(chain)
    write(put, chain[:1])
    put.write_part(1, 0, memoryview(part_bytes(chain[1], 0)))
    assert await put.commit() == (BlockState.STORED, None)
    for part in range(1, LAYOUT.parts):
        put.write_part(1, part, memoryview(part_bytes(chain[1], part)))
    assert await put.commit() == (None, BlockState.STORED)
    with pytest.raises(ValueError, match="written already"):
        put.write_part(1, 0, memoryview(part_bytes(chain[1], 0)))
    await put.release()
    with pytest.raises(PutClosed):
        put.write_part(1, 0, memoryview(part_bytes(chain[1], 0)))
    await until(lambda: idle(store), "the lease has ended")


async def test_the_longest_unused_goes_and_the_pinned_stays(here: World) -> None:
    store = await here.store(dram_bytes=1 << 14, slab_bytes=1 << 14)
    worker = await here.linked_worker()
    room = (1 << 14) // LAYOUT.slot_bytes
    chain = keys(room)
    for key in chain:
        await worker.store_blocks([key])
    pinned = await worker.begin(chain[:1], "pin")
    fresh = keys(1, first=50)
    await worker.store_blocks(fresh, "fresh")
    await worker.located(fresh)
    await until(lambda: chain[1] not in worker.index.located, "the oldest was dropped")
    assert chain[0] in worker.index.located
    every = await worker.begin(keys(room, first=100), "flood")
    assert [every.ref(i) is None for i in range(room)] == [False] * (room - 1) + [True]
    await every.release()
    await pinned.release()
    await until(lambda: idle(store), "the leases have ended")


# ---- what may go wrong with bytes


def spoil_header(view: memoryview, one: Located, _other: Located) -> None:
    view[one.slot.offset + 40] ^= 1


def spoil_part(view: memoryview, one: Located, _other: Located) -> None:
    view[one.slot.offset + LAYOUT.part_offset(3) + 7] ^= 0x80


def swap(view: memoryview, one: Located, other: Located) -> None:
    places = [
        slice(each.slot.offset, each.slot.offset + LAYOUT.slot_bytes)
        for each in (one, other)
    ]
    first, second = bytes(view[places[0]]), bytes(view[places[1]])
    view[places[0]], view[places[1]] = second, first


def swap_parts(view: memoryview, one: Located, _other: Located) -> None:
    places = [
        slice(start, start + LAYOUT.part_bytes)
        for start in (one.slot.offset + LAYOUT.part_offset(part) for part in (0, 1))
    ]
    first, second = bytes(view[places[0]]), bytes(view[places[1]])
    view[places[0]], view[places[1]] = second, first


@pytest.mark.parametrize("host", ["host-0", "host-1"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_header, MissReason.STALE),
        (spoil_part, MissReason.CORRUPT),
        (swap, MissReason.STALE),
        (swap_parts, MissReason.CORRUPT),
    ],
)
async def test_a_spoilt_block_is_a_miss_and_goes(
    here: World,
    host: str,
    spoil: Callable[[memoryview, Located, Located], None],
    reason: MissReason,
) -> None:
    store = await here.store(bad_slot_s=0.5)
    writer = await here.linked_worker("writer")
    reader = await here.worker("reader", host)
    chain = keys(2)
    await writer.store_blocks(chain)
    located = await reader.located(chain)
    # what was read once from shared memory is read in another way then
    assert all(each.ok for each in await reader.read(located, Memory()))
    spoil(arena(store), *located)
    memory = Memory()
    outcomes = await reader.read(located, memory)
    assert outcomes[0].miss is reason
    assert all(
        memory.holds(i, chain[i]) for i, outcome in enumerate(outcomes) if outcome.ok
    )
    bad = sum(not outcome.ok for outcome in outcomes)
    assert reader.count("kvtide_pool_bad_copies_total", reason=reason.value) == bad
    await until(lambda: chain[0] not in reader.index.located, "the store dropped it")
    assert store.machine is not None
    assert store.machine.tally.bad_copies == bad
    await until(lambda: idle(store), "the slot has rested")
    assert await writer.store_blocks(chain[:1], "anew") == (BlockState.STORED,)


async def test_a_reused_slot_is_a_miss(here: World) -> None:
    store = await here.store(dram_bytes=1 << 13, slab_bytes=1 << 13)
    worker = await here.linked_worker()
    assert (1 << 13) // LAYOUT.slot_bytes == 1
    old, new = keys(1), keys(1, first=99)
    await worker.store_blocks(old)
    (stale,) = await worker.located(old)
    await worker.store_blocks(new)
    await worker.located(new)
    (outcome,) = await worker.read([stale], Memory())
    assert outcome.miss is MissReason.STALE
    # the store knows that it is another use, and keeps the present one
    assert store.machine is not None
    await until(lambda: store_reports(store) == 1, "the report came")
    assert store.machine.tally.bad_copies == 0
    memory = Memory()
    assert (await worker.read(await worker.located(new), memory))[0].ok
    assert memory.holds(0, new[0])


def store_reports(store: StoreService) -> int:
    return 0 if store.machine is None else store.machine.tally.bad_reports


async def test_another_tenant_can_not_read_it(here: World) -> None:
    await here.store()
    worker = await here.linked_worker()
    chain = keys(1)
    await worker.store_blocks(chain)
    tags = replace(SPACE.tags, tenant=bytes(16))
    memory = Memory()
    outcomes = await worker.pool.read_blocks(
        await worker.located(chain), tags, LAYOUT, [memory.sink()], timeout_s=5
    )
    assert [outcome.miss for outcome in outcomes] == [MissReason.FOREIGN]


async def test_bytes_that_changed_before_the_commit_are_not_stored(
    here: World,
) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    chain = keys(2)
    put = await worker.begin(chain)
    write(put, chain)
    ref = put.ref(1)
    assert ref is not None
    arena(store)[ref.offset + LAYOUT.part_offset(2)] ^= 1
    assert await put.commit() == (BlockState.STORED, BlockState.CORRUPT)
    await put.release()
    await until(lambda: idle(store), "the lease has ended")
    await worker.located(chain[:1])
    assert chain[1] not in worker.index.located


# ---- lives and leases


async def test_a_store_that_is_gone_is_a_miss_and_puts_go_on_without(
    here: World,
) -> None:
    chain = keys(1)
    worker = await here.worker()
    with pytest.raises(PoolUnavailable):
        await worker.begin(chain)
    async with AsyncExitStack() as life:
        await here.store(stack=life)
        await until(lambda: worker.pool.ready, "the worker found its store")
        await worker.store_blocks(chain)
        (old,) = await worker.located(chain)
        put = await worker.begin(keys(1, first=9), "open")
    await until(lambda: not worker.pool.ready, "the worker heard of the end")
    with pytest.raises(PutClosed):
        put.write_part(0, 0, memoryview(part_bytes(b"x", 0)))
    with pytest.raises(PutClosed):
        await put.commit()
    with pytest.raises(PoolUnavailable) as caught:
        await worker.begin(chain)
    assert caught.value.code == "no_store"
    await until(lambda: not worker.index.located, "the index forgot it")
    assert [each.miss for each in await worker.read([old], Memory())] == [
        MissReason.STORE_GONE
    ]
    store = await here.store(epoch=2)
    await until(lambda: worker.pool.ready, "the worker found the new life")
    assert worker.pool.store == NodeRef(store.machine.store.node, 2)  # pyright: ignore[reportOptionalMemberAccess]
    assert [each.miss for each in await worker.read([old], Memory())] == [
        MissReason.STORE_GONE
    ]
    assert await worker.store_blocks(chain) == (BlockState.STORED,)
    # the old put's end must not hurt the new store's leases
    await put.release()
    assert not list(here.shm("host-0").glob("*old*"))
    assert len(list(here.shm("host-0").iterdir())) == 1


async def test_what_the_owner_does_not_list_is_freed(here: World) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    kept = await worker.begin(keys(1), "listed")
    lost = PutBegin(
        lease=worker.lease("unlisted"),
        put=0,
        tags=SPACE.tags,
        slot_bytes=LAYOUT.slot_bytes,
        header_bytes=LAYOUT.header_bytes,
        blocks=(PutBlock(None, 16),) * 3,
    )
    inbox = worker.node.subjects.inbox(Role.STORE, NodeId("store"), Hop.POOL)
    reply = await worker.node.bus.request(inbox, lost, timeout_s=5)
    assert isinstance(reply, PutGranted)
    assert load(store).reserved_slots == 4
    await until(lambda: load(store).reserved_slots == 1, "two lists went by")
    await kept.release()
    await until(lambda: idle(store), "all is free")


async def test_two_roles_of_a_process_end_their_puts_apart(here: World) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    prefill, decode = await worker.begin([None]), await worker.begin(keys(1))
    await decode.release()
    write(prefill, [None])
    assert await prefill.commit() == (BlockState.STORED,)
    await worker.pool.release(worker.lease())
    await until(lambda: idle(store), "the lease has ended")
    assert prefill.closed


async def test_only_workers_of_this_host_may_write(here: World) -> None:
    await here.store()
    worker = await here.worker("far", "host-1")
    with pytest.raises(PoolUnavailable) as caught:
        await worker.begin(keys(1))
    assert caught.value.code == "no_store"


async def test_a_lease_of_another_is_refused(here: World) -> None:
    await here.store()
    one, two = await here.linked_worker("one"), await here.linked_worker("two")
    put = PutBegin(
        lease=one.lease(),
        put=0,
        tags=SPACE.tags,
        slot_bytes=LAYOUT.slot_bytes,
        header_bytes=LAYOUT.header_bytes,
        blocks=(),
    )
    inbox = two.node.subjects.inbox(Role.STORE, NodeId("store"), Hop.POOL)
    reply = await two.node.bus.request(inbox, put, timeout_s=5)
    assert isinstance(reply, Failure)
    assert reply.code == "not_owner"
