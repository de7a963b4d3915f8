"""Stores that leave: nothing that only they had is lost."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from functools import partial
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
    write,
)

from kvtide.bus import BlockFollower
from kvtide.bus.messages import (
    BlockState,
    DrainBegin,
    DrainCancel,
    DrainPhase,
    DrainQuery,
    DrainState,
    NodeState,
    ReplicaReason,
    Replicate,
)
from kvtide.bus.subjects import Hop
from kvtide.kv import BlockKey, NodeId, Role, Tier
from kvtide.pool import PoolUnavailable
from kvtide.store.drained_mark import DrainedMark
from kvtide.store.events import BlockRow
from kvtide.store.shell import StoreService
from kvtide.store.ssd import looking

pytestmark = pytest.mark.timeout(120)  # starts a server

SLOT = -(-LAYOUT.slot_bytes // 64) * 64


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


async def follow(worker: Worker) -> Copies:
    copies = Copies()
    await BlockFollower(worker.node, copies).start()
    return copies


async def ask(
    worker: Worker, store: str, message: DrainBegin | DrainCancel | DrainQuery
) -> DrainState:
    subject = worker.node.subjects.inbox(Role.STORE, NodeId(store), Hop.QUERY)
    answer = await worker.node.bus.request(subject, message, timeout_s=5.0)
    assert isinstance(answer, DrainState)
    return answer


async def phase(worker: Worker, store: str, wanted: DrainPhase) -> DrainState:
    async with asyncio.timeout(20):
        while True:
            state = await ask(worker, store, DrainQuery())
            if state.phase is wanted:
                return state
            await asyncio.sleep(0.02)


def everywhere(copies: Copies, *stores: str) -> set[BlockKey]:
    return {key for store in stores for key in copies.at(store)}


async def read_all(
    worker: Worker, copies: Copies, chain: Sequence[BlockKey], *stores: str
) -> None:
    """Every key, verified, from one of these stores."""
    found = [
        next(copies.at(store)[key] for store in stores if key in copies.at(store))
        for key in chain
    ]
    memory = Memory()
    outcomes = await worker.read(found, memory)
    assert [outcome.ok for outcome in outcomes] == [True] * len(chain)
    assert all(memory.holds(i, key) for i, key in enumerate(chain))


def truth(service: StoreService) -> set[BlockKey]:
    assert service.machine is not None
    return set(service.machine.inventory.index.page(None, 10_000))


async def test_a_store_that_drains_loses_nothing(here: World) -> None:
    left: list[str] = []
    first = await here.store("a", "host-a", leave=lambda: left.append("a"))
    second = await here.store("b", "host-b")
    third = await here.store("c", "host-c")
    worker = await here.linked_worker("wa", "host-a")
    other = await here.linked_worker("wb", "host-b")
    copies = await follow(other)
    chain, shared = keys(60), keys(10, first=4000)
    await worker.store_blocks(chain, "r1")
    await worker.store_blocks(shared, "r2")
    await other.store_blocks(shared, "r3")
    await until(lambda: everywhere(copies, "a") == {*chain, *shared}, "told")
    state = await ask(worker, "a", DrainBegin())
    assert state.phase is DrainPhase.LOOKING
    with pytest.raises(PoolUnavailable, match="draining"):
        await worker.begin(keys(1, first=9000), "new")
    state = await phase(worker, "a", DrainPhase.LEAVING)
    assert (state.left, state.moved) == (0, 60)
    await until(lambda: left == ["a"], "it left")
    await first.close()
    assert everywhere(copies, "b", "c") >= {*chain, *shared}
    assert truth(second) | truth(third) == {*chain, *shared}
    # both took about half, and what was there was not copied again
    assert len(truth(second)) + len(truth(third)) == 70
    assert min(len(truth(second)), len(truth(third))) >= 20
    await read_all(other, copies, [*chain, *shared], "b", "c")


async def test_extra_copies_are_kept_when_the_original_leaves(here: World) -> None:
    left: list[str] = []
    await here.store("a", "host-a", leave=lambda: left.append("a"))
    second = await here.store("b", "host-b")
    worker = await here.linked_worker("wa", "host-a")
    copies = await follow(worker)
    chain = keys(4)
    await worker.store_blocks(chain)
    await until(lambda: everywhere(copies, "a") == set(chain), "told")
    subject = worker.node.subjects.inbox(Role.STORE, NodeId("b"), Hop.QUERY)
    order = Replicate(
        reason=ReplicaReason.HEAT, located=tuple(copies.located("a", chain))
    )
    await worker.node.bus.publish(subject, order)
    await until(lambda: everywhere(copies, "b") == set(chain), "copied")
    inventory = second.machine.inventory if second.machine else None
    assert inventory is not None
    slots = [slot for key in chain if (slot := inventory.index.get(key)) is not None]
    assert [inventory.is_extra(slot) for slot in slots] == [True] * 4
    await ask(worker, "a", DrainBegin())
    await until(lambda: left == ["a"], "it left")
    assert [inventory.is_extra(slot) for slot in slots] == [False] * 4
    assert second.machine is not None
    assert second.machine.tally.replicas_stored == 4


async def test_without_room_it_says_so_serves_on_and_can_be_forced(here: World) -> None:
    left: list[str] = []
    first = await here.store("a", "host-a", leave=lambda: left.append("a"))
    await here.store("b", "host-b", dram_bytes=3 * SLOT + 4096, slab_bytes=3 * SLOT)
    worker = await here.linked_worker("wa", "host-a")
    copies = await follow(worker)
    chain = keys(8)
    await worker.store_blocks(chain)
    await until(lambda: everywhere(copies, "a") == set(chain), "told")
    await ask(worker, "a", DrainBegin())
    state = await phase(worker, "a", DrainPhase.NO_ROOM)
    assert (state.left, state.moved) == (5, 3)
    assert "no other store has room for 5 blocks" in state.reason
    await read_all(worker, copies, chain, "a")
    assert not left
    # it may stay after all, and takes blocks again
    state = await ask(worker, "a", DrainCancel())
    assert state.phase is DrainPhase.IDLE
    assert await worker.store_blocks(keys(1, first=9000), "new") == (BlockState.STORED,)
    member = worker.node.roster.get(NodeId("a"))
    assert member is not None
    await until(
        lambda: (
            (found := worker.node.roster.get(NodeId("a"))) is not None
            and found.beat.state is NodeState.READY
        ),
        "it is ready again",
    )
    await ask(worker, "a", DrainBegin())
    await phase(worker, "a", DrainPhase.NO_ROOM)
    await ask(worker, "a", DrainBegin(force=True))
    state = await phase(worker, "a", DrainPhase.LEAVING)
    assert (state.left, state.blocks) == (6, 9)
    await until(lambda: left == ["a"], "it left")
    await first.close()
    await read_all(worker, copies, list(copies.at("b")), "b")
    assert len(copies.at("b")) == 3


async def test_a_drain_waits_for_running_requests_and_takes_what_they_wrote(
    here: World,
) -> None:
    left: list[str] = []
    await here.store("a", "host-a", leave=lambda: left.append("a"))
    second = await here.store("b", "host-b")
    worker = await here.linked_worker("wa", "host-a")
    chain = keys(2)
    put = await worker.begin(chain, "running")
    await ask(worker, "a", DrainBegin())
    state = await phase(worker, "a", DrainPhase.FINISHING)
    assert state.leases == 1
    write(put, chain)
    assert await put.commit() == (BlockState.STORED,) * 2
    assert not left
    await put.release()
    await until(lambda: left == ["a"], "it left")
    assert truth(second) == set(chain)


async def test_blocks_on_an_ssd_are_moved_too(here: World) -> None:
    left: list[str] = []
    first = await here.store(
        "a",
        "host-a",
        leave=lambda: left.append("a"),
        dram_bytes=8 * SLOT,
        slab_bytes=8 * SLOT,
        ssd_bytes=16 << 20,
        ssd_segment_bytes=1 << 20,
        ssd_dir=here.folder / "ssd-a",
    )
    second = await here.store("b", "host-b")
    worker = await here.linked_worker("wa", "host-a")
    copies = await follow(worker)
    chain = keys(24)

    def on_ssd(least: int) -> bool:
        found = copies.at("a").values()
        return sum(copy.slot.tier is Tier.SSD for copy in found) >= least

    for at in range(0, 24, 2):
        await worker.store_blocks(chain[at : at + 2], f"r{at}")
        if at >= 8:
            # demotion goes on in the background
            await until(
                partial(on_ssd, (at - 6) // 2),
                "some are demoted",
            )
    held = {row.located.key for row in rows(first)}
    await until(lambda: everywhere(copies, "a") == held, "all are told")
    assert len(held) > 8
    await ask(worker, "a", DrainBegin())
    await until(lambda: left == ["a"], "it left")
    assert truth(second) == held
    await read_all(worker, copies, sorted(held), "b")


def rows(service: StoreService) -> list[BlockRow]:
    machine = service.machine
    assert machine is not None
    return list(looking.rows(machine.inventory, machine.ssd))


async def test_started_again_it_stays_out_until_it_is_told(here: World) -> None:
    left: list[str] = []
    mark = DrainedMark(here.folder / "state" / "drained-a")
    await here.store("b", "host-b")
    worker = await here.worker("wa", "host-a")
    async with AsyncExitStack() as life:
        await here.store(
            "a", "host-a", stack=life, drained=mark, leave=lambda: left.append("a")
        )
        await until(lambda: worker.pool.ready, "the worker found its store")
        await worker.store_blocks(keys(5))
        await ask(worker, "a", DrainBegin())
        await until(lambda: left == ["a"], "it left")
    store = await here.store("a", "host-a", epoch=2, drained=mark)
    assert store.stays_out
    await phase(worker, "a", DrainPhase.DRAINED)
    # asked again, it is out already
    assert (await ask(worker, "a", DrainBegin())).phase is DrainPhase.DRAINED

    def state() -> NodeState | None:
        member = worker.node.roster.get(NodeId("a"))
        return None if member is None else member.beat.state

    await until(lambda: state() is NodeState.DRAINING, "it says that it is out")
    assert (await ask(worker, "a", DrainCancel())).phase is DrainPhase.IDLE
    await until(lambda: worker.pool.ready, "the worker found its store again")
    assert await worker.store_blocks(keys(5, first=70)) == (BlockState.STORED,) * 5
    assert not mark.is_set()
