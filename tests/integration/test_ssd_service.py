"""The SSD tier of a running store, read through the pool."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_world import (
    LAYOUT,
    Memory,
    Worker,
    World,
    keys,
    until,
    world,
)

from kvtide.kv import BlockKey, Located, Tier
from kvtide.store.shell import StoreService

SLOTS = 16
DRAM = SLOTS * -(-LAYOUT.slot_bytes // 64) * 64


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


async def ssd_store(
    here: World,
    *,
    stack: AsyncExitStack | None = None,
    epoch: int = 1,
    write_bytes_per_s: float = 1e9,
) -> StoreService:
    return await here.store(
        epoch=epoch,
        stack=stack,
        state_dir=here.folder / "state",
        dram_bytes=DRAM,
        slab_bytes=DRAM,
        ssd_bytes=8 << 20,
        ssd_segment_bytes=1 << 17,
        ssd_write_bytes_per_s=write_bytes_per_s,
        dram_high=0.7,
        dram_low=0.6,
    )


def on_ssd(store: StoreService, key: BlockKey) -> Located | None:
    assert store.machine is not None
    return store.machine.ssd.find(key)


async def fill(
    worker: Worker, store: StoreService, first: int, count: int
) -> tuple[BlockKey, ...]:
    """Store blocks a few at a time, so that demotion keeps up."""
    chain = keys(count, first)
    for start in range(0, count, 4):
        await worker.store_blocks(chain[start : start + 4], f"fill-{first}-{start}")
        await until(lambda: not busy(store), "the tier is quiet")
    return chain


def busy(store: StoreService) -> bool:
    machine = store.machine
    assert machine is not None
    return machine.ssd.demotion.wanted() or len(machine.ssd.demotion) > 0


async def test_cold_blocks_go_to_the_ssd_and_are_read_from_there(here: World) -> None:
    store = await ssd_store(here)
    worker = await here.linked_worker()
    await until(
        lambda: store.machine is not None and store.machine.load().ssd_state == "ready",
        "the tier is open",
    )
    chain = await fill(worker, store, 0, 40)
    found = [on_ssd(store, key) for key in chain[:20]]
    assert all(found)
    located = [each for each in found if each is not None]
    memory = Memory()
    outcomes = await worker.read(located, memory)
    assert [outcome.ok for outcome in outcomes] == [True] * 20, outcomes
    assert all(memory.holds(i, key) for i, key in enumerate(chain[:20]))
    assert all(each.slot.tier is Tier.SSD for each in located)


async def test_after_a_clean_stop_all_blocks_are_back(here: World) -> None:
    worker = await here.worker()
    async with AsyncExitStack() as first:
        store = await ssd_store(here, stack=first)
        await until(lambda: worker.pool.ready, "the worker found its store")
        chain = await fill(worker, store, 0, 40)
        # what is in use most, and the latest, is in DRAM alone
        assert any(on_ssd(store, key) is None for key in chain)
    await until(lambda: not worker.pool.ready, "the worker heard of the end")
    store = await ssd_store(here, epoch=2)
    await until(lambda: worker.pool.ready, "the worker found the new life")
    located = await worker.located(chain)
    assert {each.slot.epoch for each in located} == {2}
    memory = Memory()
    outcomes = await worker.read(located[:12], memory)
    assert [outcome.ok for outcome in outcomes] == [True] * 12, outcomes
    assert all(memory.holds(i, key) for i, key in enumerate(chain[:12]))
    await asyncio.sleep(0)
