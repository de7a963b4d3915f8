"""A store with an SSD tier as a real process, killed under load, round after round."""

import asyncio
import random
import signal
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
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
from tests.integration.store_nursery import nursery
from tests.integration.test_store_processes import process_settings

from kvtide.catalog import BlockQuery, Catalog, CatalogUnavailableError
from kvtide.kv import BlockKey, Tier
from kvtide.pool import PoolError

DRAM = 16 * LAYOUT.slot_bytes
SETTINGS = {
    "dram_bytes": DRAM - DRAM % 4096 + 4096,
    "slab_bytes": DRAM,
    "ssd_bytes": 8 << 20,
    "ssd_segment_bytes": 1 << 17,
    "dram_high": 0.6,
    "dram_low": 0.5,
}
FILES = {"lock", "superblock", "deleted"}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


@dataclass
class Load:
    """Puts and reads that go on while the store comes and goes."""

    worker: Worker
    rng: random.Random
    chain: tuple[BlockKey, ...] = field(default_factory=lambda: keys(200))
    good: int = 0
    from_ssd: int = 0
    stopped: bool = False

    async def run(self) -> None:
        while not self.stopped:
            await self.put()
            await self.read()
            await asyncio.sleep(0.002)

    async def some_reads(self) -> None:
        before = self.good
        await until(lambda: self.good > before + 20, "reads succeed")

    async def put(self) -> None:
        start = self.rng.randrange(0, len(self.chain) - 4)
        try:
            await self.worker.store_blocks(
                self.chain[start : start + 4], f"put-{self.rng.random()}"
            )
        except PoolError:
            await asyncio.sleep(0.02)

    async def read(self) -> None:
        known = list(self.worker.index.located.values())
        wanted = self.rng.sample(known, min(4, len(known)))
        memory = Memory()
        outcomes = await self.worker.read(wanted, memory)
        for i, (located, outcome) in enumerate(zip(wanted, outcomes, strict=True)):
            if outcome.ok:
                assert memory.holds(i, located.key), "wrong bytes"
                self.good += 1
                self.from_ssd += located.slot.tier is Tier.SSD


async def rows_of(folder: Path) -> set[tuple[int, Tier]]:
    """Epochs and tiers of the block rows in the catalog."""
    url = f"sqlite+aiosqlite:///{folder}/state/catalog.sqlite3"
    async with Catalog.open(url) as catalog:
        try:
            rows = await catalog.blocks(BlockQuery(limit=1000))
        except CatalogUnavailableError:
            return set()
    return {(row.epoch, row.tier) for row in rows}


async def rounds(here: World, count: int, seed: int) -> Load:
    rng = random.Random(seed)  # noqa: S311 - a test's own
    worker = await here.worker()
    load = Load(worker, rng)
    shm, epochs = here.shm("host-0"), set[int]()
    settings = process_settings(here, **SETTINGS)
    async with nursery() as stores, asyncio.TaskGroup() as group:
        group.create_task(load.run())
        for number in range(count):
            async with stores.store(settings) as store:
                epoch = await next_life(worker, epochs)
                # nothing of an earlier life is believed by anyone
                lives = {each.slot.epoch for each in worker.index.located.values()}
                assert lives <= {epoch}
                assert len(list(shm.iterdir())) == 1
                await load.some_reads()
                if number and number % 5 == 0:
                    await only_rows_of(here.folder, epoch)
                await asyncio.sleep(rng.random() * 0.2)
                await store.end(signal.SIGKILL)
        load.stopped = True
    found = {path.name for path in (here.folder / "state/ssd/store").iterdir()}
    assert {name for name in found - FILES if not name.endswith(".seg")} == set()
    return load


async def next_life(worker: Worker, epochs: set[int]) -> int:
    def fresh() -> bool:
        store = worker.pool.store
        return store is not None and store.epoch not in epochs

    await until(fresh, "the worker found the new life")
    store = worker.pool.store
    assert store is not None
    epochs.add(store.epoch)
    if len(epochs) > 1:
        await until(
            lambda: any(
                each.slot.epoch == store.epoch and each.slot.tier is Tier.SSD
                for each in worker.index.located.values()
            ),
            "blocks came back from the SSD",
        )
    return store.epoch


async def only_rows_of(folder: Path, epoch: int) -> None:
    async with asyncio.timeout(20):
        while {each for each, _ in await rows_of(folder)} != {epoch}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.timeout(180)
async def test_killed_again_and_again_it_serves_what_the_ssd_has(here: World) -> None:
    load = await rounds(here, 20, seed=1)
    assert load.from_ssd > 20


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_killed_a_hundred_times_it_serves_what_the_ssd_has(here: World) -> None:
    load = await rounds(here, 100, seed=2)
    assert load.from_ssd > 100
