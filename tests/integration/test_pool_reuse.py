"""Slots reused between look-up and read, many times under load: right, or a miss."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_world import (
    Memory,
    Worker,
    World,
    keys,
    until,
    world,
    write,
)

from kvtide.bus.messages import BlockState

CHAINS = 40
ROUNDS = 120


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


async def put_blocks(worker: Worker, name: str, seed: int) -> None:
    """Puts of every kind: committed, abandoned, committed by halves, cancelled."""
    draw = random.Random(seed)  # noqa: S311 - a test's choices, repeatable
    for number in range(ROUNDS):
        chain = [*keys(3, first=1000 * draw.randrange(CHAINS)), None]
        put = await worker.begin(chain, f"{name}-{number}")
        write(put, chain)
        match draw.randrange(10):
            case 0:
                pass
            case 1:
                commit = asyncio.ensure_future(put.commit())
                await asyncio.sleep(0)
                commit.cancel()
                await asyncio.gather(commit, return_exceptions=True)
            case _:
                assert BlockState.CORRUPT not in await put.commit()
        await put.release()


async def read_blocks(worker: Worker, done: asyncio.Event, seed: int) -> Counter[str]:
    """Read what the gossip says until the writers are done; what came of it."""
    draw = random.Random(seed)  # noqa: S311 - a test's choices, repeatable
    seen: Counter[str] = Counter()
    while not done.is_set():
        known = list(worker.index.located.values())
        chosen = draw.sample(known, min(5, len(known)))
        # time for the copies to be evicted before they are read
        await asyncio.sleep(draw.random() * 0.01)
        memory = Memory()
        for i, outcome in enumerate(await worker.read(chosen, memory)):
            right = memory.holds(i, chosen[i].key)
            seen[outcome.miss or ("right" if right else "wrong")] += 1
    return seen


@pytest.mark.timeout(180)
async def test_reused_slots_are_right_or_missed(here: World) -> None:
    store = await here.store(dram_bytes=1 << 17, slab_bytes=1 << 14)
    writers = [await here.linked_worker(name) for name in ("one", "two")]
    readers = [*writers, await here.worker("far", "host-1")]
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        reads = [
            group.create_task(read_blocks(reader, done, seed))
            for seed, reader in enumerate(readers)
        ]
        puts = [
            group.create_task(put_blocks(writer, f"{writer.node.ref.node}{lane}", lane))
            for lane in range(2)
            for writer in writers
        ]
        await asyncio.gather(*puts)
        done.set()
    seen = sum((read.result() for read in reads), Counter[str]())
    assert seen["wrong"] == 0
    assert seen["right"] > ROUNDS
    assert seen["stale"] > 0

    machine = store.machine
    assert machine is not None
    await until(
        lambda: (
            machine.load().leases == machine.load().pins == 0
            and machine.load().reserved_slots == 0
        ),
        "all leases have ended",
    )
    # what was said is what is there
    present = set(machine.inventory.index.page(None, 1000))
    for reader in readers:
        await until(
            lambda reader=reader: reader.index.located.keys() == present,
            "the gossip was heard",
        )
    load = machine.load()
    assert load.used_slots == len(present)
    assert machine.tally.evicted > 0
    assert machine.tally.bad_copies == 0
