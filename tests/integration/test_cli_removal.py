"""``kvtide blocks remove`` where stores are down, or the catalog is."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.pool_copies import Copies
from tests.integration.pool_world import LAYOUT, Worker, World, keys, until
from tests.integration.test_cli_pool import (
    answer,
    follow,
    here,
    kvtide,
    kvtide_process,
    node,
)

from kvtide.bus.messages import StoreLoad
from kvtide.catalog import Catalog, NodeRow
from kvtide.kv import BlockKey, NodeId, Tier

__all__ = ["here"]

pytestmark = pytest.mark.timeout(180)  # starts servers and commands

DRAM = 16 * -(-LAYOUT.slot_bytes // 64) * 64


def ssd_node(here: World) -> Any:
    return node(
        here,
        "a",
        dram_bytes=DRAM,
        slab_bytes=DRAM,
        ssd_bytes=8 << 20,
        ssd_segment_bytes=1 << 17,
        ssd_write_bytes_per_s=1e9,
        dram_high=0.7,
        dram_low=0.6,
    )


def on_ssd(copies: Copies) -> int:
    found = copies.stores.get(NodeId("a"), {})
    return sum(tier is Tier.SSD for _, tier in found)


async def fill(worker: Worker, copies: Copies, first: int) -> tuple[BlockKey, ...]:
    """Blocks of the tenant ``t`` in both tiers."""
    chain = keys(40, first)
    for start in range(0, 40, 4):
        there = on_ssd(copies)
        await worker.store_blocks(chain[start : start + 4], f"fill-{first}-{start}")
        if start >= 12:
            await until(lambda there=there: on_ssd(copies) > there, "some are demoted")
    return chain


async def opened(worker: Worker, life: int) -> int:
    """Wait for a life of the store after ``life`` that has looked at its SSD."""
    epoch = 0

    def looked() -> bool:
        nonlocal epoch
        member = worker.node.roster.get(NodeId("a"))
        if member is None or member.beat.node.epoch <= life:
            return False
        epoch = member.beat.node.epoch
        loads = [each for each in member.beat.load if isinstance(each, StoreLoad)]
        return [each.ssd_state for each in loads] == ["ready"] and worker.pool.ready

    await until(looked, "the store has opened its SSD")
    return epoch


async def left(here: World) -> set[str]:
    listed = await answer(here, "blocks", "list", "--source", "stores")
    return {each["key"] for each in listed["blocks"]}


async def test_what_is_removed_while_its_store_is_down_stays_removed(
    here: World,
) -> None:
    async with ssd_node(here) as store:
        worker = await here.linked_worker("w", "host-a")
        copies = await follow(worker)
        first = await opened(worker, 0)
        await fill(worker, copies, 0)
        assert len(await left(here)) >= 20
        store.process.terminate()
        assert await store.process.wait() == 0
    code, out = await kvtide(here, "blocks", "remove", "--tenant", "t", "--yes")
    assert code == 0, out
    assert "when they start" in out
    async with ssd_node(here) as store:
        second = await opened(worker, first)
        assert await left(here) == set()
        later = await fill(worker, copies, 100)
        single = sorted(await left(here))[:2]
        store.process.terminate()
        assert await store.process.wait() == 0
    code, out = await kvtide(here, "blocks", "remove", *single, "--yes")
    assert code == 0, out
    assert "when they start" in out
    async with ssd_node(here):
        await opened(worker, second)
        # those that were on the SSD by then, but not the two
        assert await left(here)
        assert await left(here) <= {key.hex() for key in later} - set(single)
        # what is asked about is what is told
        words = ("blocks", "remove", "--tenant", "t")
        _, out = await kvtide_process(here, *words)
        asked = re.search(r"Remove (\d+) blocks, (\d+) copies", out)
        assert asked, out
        blocks, copies_there = asked.groups()
        code, out = await kvtide(here, *words, "--yes")
        told = f"a: {blocks} of {blocks} blocks removed, {copies_there} copies"
        assert (code, out.strip()) == (0, told)


async def test_stores_that_are_known_and_not_there_are_named(here: World) -> None:
    def row(name: str, role: str) -> NodeRow:
        return NodeRow(NodeId(name), 1, (role,), "host", "ready", "", 1.0)

    async with node(here, "a"):
        worker = await here.linked_worker("w", "host-a")
        await worker.store_blocks(keys(3))
        url = f"sqlite+aiosqlite:///{here.folder}/state/catalog.sqlite3"
        async with Catalog.open(url) as catalog:
            await catalog.migrate()
            await catalog.write(
                [row(*each) for each in (("a", "store"), ("b", "store"))]
            )
            await catalog.write([row("c", "decode")])
        code, out = await kvtide(here, "blocks", "remove", "--tenant", "t", "--yes")
        assert code == 0, out
        assert "a: 3 of 3 blocks removed" in out
        assert "not heard of: b; stores forget these blocks when they start or" in out


async def test_without_a_catalog_it_is_said_who_will_not_hear(
    here: World, tmp_path: Path
) -> None:
    away = ("--catalog", f"sqlite:///{tmp_path}/none.sqlite3")
    words = ("blocks", "remove", "--tenant", "t", "--yes", *away)
    code, out = await kvtide(here, *words)
    assert code == 75
    assert "no store is live" in out
    assert "nothing is removed" in out
    async with node(here, "a"):
        worker = await here.linked_worker("w", "host-a")
        await worker.store_blocks(keys(3))
        code, out = await kvtide(here, *words)
        assert code == 1
        assert "a: 3 of 3 blocks removed" in out
        assert "only live stores heard of it" in out
        assert await left(here) == set()
