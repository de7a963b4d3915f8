"""A store's rows when its catalog lost changes, and there are more than the queue holds."""

# pyright: reportPrivateUsage=false
import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_world import LAYOUT, World, keys, until, world

from kvtide.bus.messages import BlockState, PlacementMade
from kvtide.catalog import BlockQuery, Catalog, Change, Writer, WriterLimits
from kvtide.kv import BlockKey, RequestId
from kvtide.runtime import SystemClock
from kvtide.store.heat import UseLog
from kvtide.store.rows import CatalogRows
from kvtide.store.shell import StoreService

pytestmark = pytest.mark.timeout(120)  # starts a server, waits on a locked file

BLOCKS = 30
QUICK = WriterLimits(
    capacity=20, batch=8, linger_s=0.01, first_pause_s=0.05, longest_pause_s=0.2
)


@dataclass
class Repairs:
    """Counts what the writer asks of a store."""

    service: StoreService | None = None
    asked: list[int] = field(default_factory=list[int])

    def __call__(self) -> Iterator[Change]:
        self.asked.append(1)
        assert self.service is not None
        return self.service.repair_rows()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


async def test_a_repair_of_more_rows_than_the_queue_holds_ends(
    here: World, tmp_path: Path
) -> None:
    path = tmp_path / "catalog.sqlite3"
    clock, repairs = SystemClock(), Repairs()
    async with Catalog.open(f"sqlite:///{path}") as catalog:
        await catalog.migrate()
        writer = Writer(catalog, clock=clock, limits=QUICK, on_repair=repairs)
        arena = -(-LAYOUT.slot_bytes // 64) * 64 * BLOCKS
        repairs.service = await here.store(
            rows=CatalogRows(writer.put, clock),
            dram_bytes=arena + 4096,
            slab_bytes=arena,
        )
        worker = await here.worker()
        await until(lambda: worker.pool.ready, "the worker found its store")
        writer.start()

        async def store(first: int) -> None:
            chain = keys(5, first=first)
            states = await worker.store_blocks(chain, f"r{first}")
            assert states == (BlockState.STORED,) * 5

        for first in range(0, BLOCKS, 5):
            await store(first)
            async with asyncio.timeout(20):
                while len(await stored(catalog)) < first + 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        before = await stored(catalog)
        assert len(before) == BLOCKS
        with locked(path):
            # each evicts one whose row is in the catalog
            for first in range(100, 100 + BLOCKS, 5):
                await store(first)
            lost = 2 * BLOCKS - QUICK.capacity
            await until(lambda: writer.dropped == lost, "changes are lost")
        assert await writer.flushed(timeout_s=60)
        assert repairs.asked == [1]
        machine = repairs.service.machine
        assert machine is not None
        truth = set(machine.inventory.index.page(None, 1000))
        assert len(truth) == BLOCKS
        assert not truth & before
        assert await stored(catalog) == truth
        await writer.close()


async def stored(catalog: Catalog) -> set[BlockKey]:
    return {row.key for row in await catalog.blocks(BlockQuery())}


async def test_how_often_blocks_are_wanted_is_told_now_and_then(
    here: World, tmp_path: Path
) -> None:
    path = tmp_path / "catalog.sqlite3"
    clock = SystemClock()
    async with Catalog.open(f"sqlite:///{path}") as catalog:
        await catalog.migrate()
        writer = Writer(catalog, clock=clock, limits=QUICK)
        writer.start()
        service = await here.store(rows=CatalogRows(writer.put, clock))
        service._uses = UseLog(every_s=0.0)
        worker = await here.linked_worker()
        chain = keys(3)
        await worker.store_blocks(chain)
        async with asyncio.timeout(20):
            while len(await stored(catalog)) < len(chain):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        made = PlacementMade(
            conductor=worker.node.ref,
            request=RequestId("r"),
            attempt=0,
            gateway=worker.node.ref,
            model="tiny",
            prefill=None,
            decode=worker.node.ref.node,
            new_tokens=0,
            prompt_tokens=0,
            max_new_tokens=0,
            prefill_ms=0.0,
            keys=chain[:2],
            hold_ms=0.0,
        )
        subject = worker.node.subjects.placements(worker.node.ref.node)
        for _ in range(3):
            await worker.node.bus.publish(subject, made)
        async with asyncio.timeout(20):
            while len(await hot(catalog)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await hot(catalog) == set(chain[:2])
        await writer.close()


async def hot(catalog: Catalog) -> set[BlockKey]:
    return {row.key for row in await catalog.blocks(BlockQuery(least_hits=2))}
