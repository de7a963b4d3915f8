"""Copies at other stores, over real NATS, shared memory and TCP."""

# pyright: reportPrivateUsage=false
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_copies import Copies
from tests.integration.pool_world import (
    LAYOUT,
    Memory,
    Worker,
    World,
    keys,
    until,
    world,
)

from kvtide.bus import BlockFollower, Node
from kvtide.bus.messages import (
    BlockState,
    DropExtras,
    Message,
    ReplicaReason,
    ReplicaReply,
    Replicate,
)
from kvtide.bus.subjects import Hop
from kvtide.kv import BlockKey, Located, NodeId, Role
from kvtide.store.shell import StoreService

pytestmark = pytest.mark.timeout(120)  # starts a server

SLOT = -(-LAYOUT.slot_bytes // 64) * 64


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


async def tell(node: Node, store: str, message: Message) -> object:
    subject = node.subjects.inbox(Role.STORE, NodeId(store), Hop.QUERY)
    return await node.bus.request(subject, message, timeout_s=5.0)


async def follow(worker: Worker) -> Copies:
    copies = Copies()
    follower = BlockFollower(worker.node, copies)
    await follower.start()
    return copies


async def order(
    worker: Worker,
    to: str,
    located: Sequence[Located],
    reason: ReplicaReason = ReplicaReason.HEAT,
) -> ReplicaReply:
    answer = await tell(
        worker.node, to, Replicate(reason=reason, located=tuple(located))
    )
    assert isinstance(answer, ReplicaReply)
    return answer


def has(copies: Copies, store: str, wanted: Sequence[BlockKey]) -> bool:
    return set(wanted) <= set(copies.at(store))


async def check(
    worker: Worker, copies: Copies, store: str, chain: Sequence[BlockKey]
) -> None:
    """Every byte of these copies, read and verified."""
    memory = Memory()
    found = [copies.at(store)[key] for key in chain]
    outcomes = await worker.read(found, memory)
    assert [outcome.ok for outcome in outcomes] == [True] * len(chain)
    for i, key in enumerate(chain):
        assert memory.holds(i, key)


def truth(service: StoreService) -> set[BlockKey]:
    assert service.machine is not None
    return set(service.machine.inventory.index.page(None, 10_000))


async def test_blocks_are_copied_on_an_order_and_told(here: World) -> None:
    await here.store("a", "host-a")
    second = await here.store("b", "host-b")
    worker = await here.linked_worker("w", "host-a")
    copies = await follow(worker)
    chain = keys(8)
    assert await worker.store_blocks(chain) == (BlockState.STORED,) * 8
    await until(lambda: has(copies, "a", chain), "the originals are told")
    answer = await order(worker, "b", copies.located("a", chain))
    assert answer == ReplicaReply(here=0, queued=8, refused=0)
    await until(lambda: has(copies, "b", chain), "the copies are told")
    await check(worker, copies, "b", chain)
    await check(worker, copies, "a", chain)
    assert set(copies.at("b")) == truth(second)
    # again: nothing is to be done, and nothing is told
    answer = await order(worker, "b", copies.located("a", chain))
    assert answer == ReplicaReply(here=8, queued=0, refused=0)
    await tell(worker.node, "b", DropExtras(keys=chain[4:]))
    await until(lambda: len(copies.at("b")) == 4, "cold copies went")
    assert set(copies.at("b")) == truth(second) == set(chain[:4])
    # the originals are no extras
    await tell(worker.node, "a", DropExtras(keys=chain))
    await check(worker, copies, "a", chain)


async def test_extra_copies_go_first(here: World) -> None:
    await here.store("a", "host-a")
    second = await here.store(
        "b", "host-b", dram_bytes=6 * SLOT + 4096, slab_bytes=6 * SLOT
    )
    first = await here.linked_worker("wa", "host-a")
    local = await here.linked_worker("wb", "host-b")
    copies = await follow(first)
    old, hot = keys(3, first=1000), keys(3)
    # older than the copies, and not extra: they stay
    await local.store_blocks(old, "old")
    await first.store_blocks(hot, "hot")
    await until(lambda: has(copies, "a", hot), "told")
    await order(first, "b", copies.located("a", hot))
    await until(lambda: has(copies, "b", hot), "copied")
    fresh = keys(3, first=2000)
    assert await local.store_blocks(fresh, "fresh") == (BlockState.STORED,) * 3
    await until(lambda: not set(hot) & set(copies.at("b")), "the extras went")
    await until(lambda: has(copies, "b", [*old, *fresh]), "told")
    assert truth(second) == {*old, *fresh}


async def test_a_copy_for_a_drain_evicts_nothing_but_extras(here: World) -> None:
    await here.store("a", "host-a")
    second = await here.store(
        "b", "host-b", dram_bytes=4 * SLOT + 4096, slab_bytes=4 * SLOT
    )
    first = await here.linked_worker("wa", "host-a")
    local = await here.linked_worker("wb", "host-b")
    copies = await follow(first)
    own, hot, moved = keys(2, first=1000), keys(2), keys(4, first=500)
    await local.store_blocks(own, "own")
    await first.store_blocks((*hot, *moved), "hot")
    await until(lambda: has(copies, "a", (*hot, *moved)), "told")
    await order(first, "b", copies.located("a", hot))
    await until(lambda: has(copies, "b", hot), "copied")
    await order(first, "b", copies.located("a", moved), ReplicaReason.DRAIN)
    machine = second.machine
    assert machine is not None
    await until(lambda: machine.tally.replicas_no_room == 2, "two found no room")
    # those that found room may still be on their way
    await until(lambda: len(truth(second)) == 4, "the others came")
    kept = truth(second)
    assert set(own) <= kept <= {*own, *moved}


async def test_a_corrupt_source_is_refused_counted_and_reported(here: World) -> None:
    source = await here.store("a", "host-a")
    second = await here.store("b", "host-b")
    worker = await here.linked_worker("w", "host-a")
    copies = await follow(worker)
    chain = keys(3)
    await worker.store_blocks(chain)
    await until(lambda: has(copies, "a", chain), "told")
    found = copies.located("a", chain)
    arena = source._arena
    assert arena is not None
    # a byte of a part, and a byte of a header's checksum
    arena.view[found[1].slot.offset + LAYOUT.header_bytes + 5] ^= 0xFF
    arena.view[found[2].slot.offset + 140] ^= 0xFF
    await order(worker, "b", found)
    machine = second.machine
    assert machine is not None
    await until(lambda: machine.tally.replicas_corrupt == 2, "both were refused")
    await until(lambda: has(copies, "b", chain[:1]), "the good one is there")
    assert truth(second) == {chain[0]}
    counts = machine.inventory.table.counts()
    assert (counts.used, counts.reserved) == (1, 0)
    # the source looked for itself, and took them out
    await until(lambda: set(copies.at("a")) == {chain[0]}, "bad copies are gone")


async def test_another_source_is_tried_when_one_is_gone(here: World) -> None:
    first = await here.store("a", "host-a")
    await here.store("b", "host-b")
    worker = await here.linked_worker("w", "host-a")
    copies = await follow(worker)
    chain = keys(3)
    await worker.store_blocks(chain)
    await until(lambda: has(copies, "a", chain), "told")
    await order(worker, "b", copies.located("a", chain))
    await until(lambda: has(copies, "b", chain), "copied")
    sources = [*copies.located("a", chain), *copies.located("b", chain)]
    await first.close()
    third = await here.store("c", "host-c")
    roster = third._node.roster
    await until(lambda: roster.get(NodeId("b")) is not None, "c has heard of b")
    await order(worker, "c", sources)
    await until(lambda: has(copies, "c", chain), "copied from the second source")
    assert truth(third) == set(chain)
    await check(worker, copies, "c", chain)


async def test_copying_is_slowed_to_its_rate(here: World) -> None:
    await here.store("a", "host-a")
    second = await here.store("b", "host-b", replica_bytes_per_s=50 * SLOT)
    worker = await here.linked_worker("w", "host-a")
    copies = await follow(worker)
    chain = keys(40)
    await worker.store_blocks(chain)
    await until(lambda: has(copies, "a", chain), "told")
    started_s = here.clock.monotonic()
    await order(worker, "b", copies.located("a", chain))
    machine = second.machine
    assert machine is not None
    assert machine.arrivals.replicas.queued > 20
    await until(lambda: has(copies, "b", chain), "copied")
    # 40 blocks at 50 a second; a burst of five is free
    assert here.clock.monotonic() - started_s >= 0.6
