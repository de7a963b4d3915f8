"""Store and writer as real processes: killed, stopped, continued."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_world import (
    CLUSTER,
    LAYOUT,
    SECRET,
    SPACE,
    Memory,
    Worker,
    World,
    keys,
    until,
    world,
)

from kvtide.bus.messages import BlockState, StoreLoad
from kvtide.catalog import BlockQuery, Catalog, CatalogUnavailableError
from kvtide.kv import BlockKey, NodeId

STORE_PROGRAM = Path(__file__).with_name("cluster_process.py")
WRITER_PROGRAM = Path(__file__).with_name("pool_writer_process.py")
ROOT = Path(__file__).parents[2]
SLOTS = 3


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


class Process:
    """A program under test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def program(path: Path, *arguments: str) -> AsyncGenerator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(path),
        *arguments,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        # the transport of a pipe that was never read warns when it is collected
        if process.stdout is not None:
            await process.stdout.read()


def process_settings(here: World, **values: object) -> dict[str, object]:
    """Of a store in a process of its own."""
    secret = here.folder / "secret"
    secret.write_text(SECRET.hex())
    secret.chmod(0o600)
    return {
        "node": "store",
        "nats": here.nats,
        "cluster": CLUSTER,
        "state_dir": str(here.folder / "state"),
        "secret_file": str(secret),
        "shm_dir": str(here.shm("host-0")),
        "dram_bytes": 1 << 14,
        "slab_bytes": 1 << 14,
        "log_level": "warning",
        **values,
    }


@asynccontextmanager
async def store_process(here: World, **values: object) -> AsyncGenerator[Process]:
    settings = json.dumps(process_settings(here, **values))
    async with program(STORE_PROGRAM, "store", settings) as process:
        yield process


@asynccontextmanager
async def writer_process(here: World, blocks: int) -> AsyncGenerator[Process]:
    arguments = (here.nats, str(here.shm("host-0")), "stopped-writer", str(blocks))
    async with program(WRITER_PROGRAM, *arguments) as writer:
        assert writer.process.stdout is not None
        async with asyncio.timeout(30):
            line = await writer.process.stdout.readline()
        assert line.split() == [b"ready", str(blocks).encode()]
        yield writer


def load(worker: Worker) -> StoreLoad:
    """What the store last said of itself."""
    member = worker.node.roster.get(NodeId("store"))
    if member is None:
        return StoreLoad()
    return next(
        (each for each in member.beat.load if isinstance(each, StoreLoad)), StoreLoad()
    )


@pytest.mark.timeout(120)
async def test_a_killed_store_leaves_nothing_behind(here: World) -> None:
    shm = here.shm("host-0")
    worker = await here.worker()
    chain = keys(2)
    async with store_process(here) as store:
        await until(lambda: worker.pool.ready, "the worker found its store")
        assert await worker.store_blocks(chain) == (BlockState.STORED,) * 2
        (old, _) = await worker.located(chain)
        assert await store.end(signal.SIGKILL) == -signal.SIGKILL
    (leftover,) = list(shm.iterdir())
    await until(lambda: not worker.pool.ready, "the worker heard of the death")
    async with store_process(here) as store:
        await until(lambda: worker.pool.ready, "the worker found the new life")
        assert len(list(shm.iterdir())) == 1
        assert not leftover.exists()
        assert not (await worker.read([old], Memory()))[0].ok
        assert await worker.store_blocks(chain, "anew") == (BlockState.STORED,) * 2
        memory = Memory()
        await until(
            lambda: all(
                key in worker.index.located
                and worker.index.located[key].slot.epoch != old.slot.epoch
                for key in chain
            ),
            "the new copies are told",
        )
        outcomes = await worker.read(await worker.located(chain), memory)
        assert [outcome.ok for outcome in outcomes] == [True, True]
        assert await store.end(signal.SIGTERM) == 0
        assert list(shm.iterdir()) == []


@pytest.mark.timeout(120)
async def test_block_rows_follow_in_the_catalog(here: World) -> None:
    worker = await here.worker()
    chain = keys(SLOTS)
    url = f"sqlite+aiosqlite:///{here.folder}/state/catalog.sqlite3"
    async with store_process(here) as store:
        await until(lambda: worker.pool.ready, "the worker found its store")
        await worker.store_blocks(chain)
        fresh = keys(1, first=500)
        # the tail of the chain is evicted for it
        await worker.store_blocks(fresh, "fresh")
        async with Catalog.open(url) as catalog, asyncio.timeout(20):
            while await stored_keys(catalog) != {*chain[:-1], *fresh}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            (row, *_) = await catalog.blocks(BlockQuery())
            assert (row.length, row.tokens) == (LAYOUT.slot_bytes, 16)
            assert row.tenant_tag == SPACE.tags.tenant
        assert await store.end(signal.SIGTERM) == 0
    async with Catalog.open(url) as catalog:
        # the memory is gone, and the rows with it
        assert await stored_keys(catalog) == set()


async def stored_keys(catalog: Catalog) -> set[BlockKey]:
    try:
        return {row.key for row in await catalog.blocks(BlockQuery())}
    except CatalogUnavailableError:
        # the store is only just making the tables
        return set()


@pytest.mark.timeout(120)
async def test_a_killed_writer_frees_its_slots(here: World) -> None:
    worker = await here.worker()
    async with store_process(here):
        await until(lambda: worker.pool.ready, "the worker found its store")
        async with writer_process(here, SLOTS) as writer:
            await until(lambda: load(worker).reserved_slots == SLOTS, "it holds all")
            put = await worker.begin(keys(1))
            assert put.ref(0) is None
            await put.release()
            await writer.end(signal.SIGKILL)
            await until(
                lambda: load(worker).reserved_slots == 0 and load(worker).leases == 0,
                "its slots are free",
            )
        chain = keys(SLOTS)
        assert await worker.store_blocks(chain) == (BlockState.STORED,) * SLOTS


@pytest.mark.timeout(120)
async def test_a_stopped_writer_that_wakes_is_never_read(here: World) -> None:
    """Its slots are reused; what it scribbles into them is a miss, never an answer."""
    worker = await here.worker()
    async with store_process(here, bad_slot_s=0.2):
        await until(lambda: worker.pool.ready, "the worker found its store")
        async with writer_process(here, SLOTS) as writer:
            await until(lambda: load(worker).reserved_slots == SLOTS, "it holds all")
            writer.process.send_signal(signal.SIGSTOP)
            await until(
                lambda: (
                    load(worker).total_slots == SLOTS
                    and load(worker).reserved_slots == 0
                    and load(worker).quarantined_slots == 0
                ),
                "membership gave it up",
            )
            chain = keys(SLOTS)
            assert await worker.store_blocks(chain) == (BlockState.STORED,) * SLOTS
            copies = await worker.located(chain)
            memory = Memory()
            outcomes = await worker.read(copies, memory)
            assert [outcome.ok for outcome in outcomes] == [True] * SLOTS
            writer.process.send_signal(signal.SIGCONT)
            misses = await read_until_missed(worker, chain)
            assert misses > 0
            await writer.end(signal.SIGKILL)
        # with the scribbler dead, what is stored from now on stays right
        await until(lambda: load(worker).quarantined_slots == 0, "bad slots rested")
        fresh = keys(1, first=700)
        assert await worker.store_blocks(fresh, "fresh") == (BlockState.STORED,)
        memory = Memory()
        assert (await worker.read(await worker.located(fresh), memory))[0].ok
        assert memory.holds(0, fresh[0])


async def read_until_missed(worker: Worker, chain: tuple[BlockKey, ...]) -> int:
    """Read and write again for a while; every byte that is said to be right is."""
    misses = 0
    async with asyncio.timeout(30):
        for attempt in range(1000):
            known = [
                each for each in worker.index.located.values() if each.key in chain
            ]
            memory = Memory()
            for i, outcome in enumerate(await worker.read(known, memory)):
                if outcome.ok:
                    assert memory.holds(i, known[i].key)
                else:
                    misses += 1
            if misses >= SLOTS and attempt >= 30:
                return misses
            states = await worker.store_blocks(keys(1, first=attempt), f"r{attempt}")
            assert set(states) <= {BlockState.STORED, BlockState.CORRUPT, None}
            await asyncio.sleep(0.01)
    return misses
