"""Lives that end by a pause: a store's and a worker's, each fenced in place."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
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

from kvtide.bus import Node
from kvtide.bus.messages import BlockState
from kvtide.kv import NodeId
from kvtide.pool import MissReason, PoolUnavailable, PutClosed


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


async def pause_and_fence(node: Node) -> None:
    """What a node does when it finds that it stood still for too long."""
    await node._fence_self()  # pyright: ignore[reportPrivateUsage]


async def test_a_fenced_store_begins_anew_and_empty(here: World) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    before = store.machine
    assert before is not None
    chain = keys(2)
    await worker.store_blocks(chain)
    (old, _) = await worker.located(chain)
    open_put = await worker.begin([None], "open")
    await pause_and_fence(store._node)  # pyright: ignore[reportPrivateUsage]
    machine = store.machine
    assert machine is not None
    assert machine.store.epoch > before.store.epoch
    assert machine.load().used_slots == machine.load().reserved_slots == 0
    await until(lambda: open_put.closed, "the worker heard of it")
    with pytest.raises(PutClosed):
        open_put.write_part(0, 0, memoryview(part_bytes(b"p", 0)))
    await until(lambda: worker.pool.store == machine.store, "the worker is linked anew")
    assert [each.miss for each in await worker.read([old], Memory())] == [
        MissReason.STORE_GONE
    ]
    assert await worker.store_blocks(chain, "anew") == (BlockState.STORED,) * 2
    fresh = await worker.located(chain)
    # no generation is ever used twice, not even by two lives
    assert min(each.slot.generation for each in fresh) > old.slot.generation
    memory = Memory()
    assert all(outcome.ok for outcome in await worker.read(fresh, memory))
    assert memory.holds(0, chain[0])


async def test_a_fenced_worker_writes_no_more_and_its_slots_are_freed(
    here: World,
) -> None:
    store = await here.store()
    worker = await here.linked_worker()
    chain = keys(1)
    lease = worker.lease()
    put = await worker.begin(chain)
    write(put, chain)
    await pause_and_fence(worker.node)
    assert worker.node.ref.epoch > lease.owner.epoch
    with pytest.raises(PutClosed):
        await put.commit()
    machine = store.machine
    assert machine is not None
    await until(lambda: machine.load().reserved_slots == 0, "the old life's are free")
    # the new life puts at once, the old one's lease is no good
    assert await worker.store_blocks(chain, "new") == (BlockState.STORED,)
    with pytest.raises(PoolUnavailable):
        await worker.pool.begin(lease, SPACE.tags, LAYOUT, [])
    await put.release()
    assert machine.load().used_slots == 1


async def test_a_put_without_a_store_is_only_not_pooled(here: World) -> None:
    worker = await here.worker()
    assert not worker.pool.ready
    assert worker.pool.store is None
    with pytest.raises(PoolUnavailable):
        await worker.begin(keys(1))
    await worker.pool.release(worker.lease())
    assert await worker.pool.read_parts([], LAYOUT, timeout_s=1) == []
    assert worker.node.roster.get(NodeId("store")) is None


async def test_another_store_of_the_host_takes_over(here: World) -> None:
    worker = await here.worker()
    chain = keys(1)
    async with AsyncExitStack() as life:
        await here.store("store-a", stack=life)
        await until(lambda: worker.pool.ready, "the worker found the first store")
        second = await here.store("store-b")
        await worker.store_blocks(chain)
        assert worker.pool.store is not None
        assert worker.pool.store.node == "store-a"
    machine = second.machine
    assert machine is not None
    await until(lambda: worker.pool.store == machine.store, "the second one took over")
    assert await worker.store_blocks(chain, "again") == (BlockState.STORED,)
    (copy,) = await worker.located(chain)
    assert copy.slot.node == "store-b"


async def test_a_client_that_closes_lets_go_at_once(here: World) -> None:
    store = await here.store()
    machine = store.machine
    assert machine is not None
    worker = await here.linked_worker()
    puts = [await worker.begin([None], request) for request in ("one", "two", "two")]
    assert machine.load().leases == 2
    await worker.pool.close()
    assert all(put.closed for put in puts)
    await until(lambda: machine.load().leases == 0, "the releases came")
    assert machine.load().reserved_slots == 0
    assert worker.node.roster.is_live(worker.node.ref)
