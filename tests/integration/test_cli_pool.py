"""``kvtide blocks`` and ``kvtide drain`` at real stores, NATS and catalog."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_copies import Copies
from tests.integration.pool_world import (
    LAYOUT,
    SECRET,
    Memory,
    Worker,
    World,
    keys,
    until,
    world,
)
from tests.integration.test_store_processes import store_process
from typer.testing import CliRunner

from kvtide.bus import BlockFollower
from kvtide.cli.__main__ import app
from kvtide.kv import BlockKey

pytestmark = pytest.mark.timeout(180)  # starts servers and commands

SLOT = -(-LAYOUT.slot_bytes // 64) * 64


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    state = tmp_path / "state"
    state.mkdir()
    (state / "secret").write_text(SECRET.hex())
    (state / "secret").chmod(0o600)
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


async def kvtide(here: World, *words: str) -> tuple[int, str]:
    """Run a command at this world, in a thread; its exit code and output."""
    flags = ("--nats", here.nats, "--state-dir", str(here.folder / "state"))
    result = await asyncio.to_thread(
        CliRunner().invoke, app, [*words, *flags], env={"COLUMNS": "200"}
    )
    return result.exit_code, result.output


async def kvtide_process(
    here: World, *words: str, columns: str = "200"
) -> tuple[int, str]:
    """As ``kvtide``, in a process of its own, where nobody is at a terminal."""
    flags = ("--nats", here.nats, "--state-dir", str(here.folder / "state"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtide.cli", *words, *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": columns},
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def answer(here: World, *words: str) -> Any:
    code, out = await kvtide(here, *words, "--json")
    assert code == 0, out
    return json.loads(out)


def node(here: World, name: str, **values: object) -> Any:
    """A store in a process of its own, on a host of its own."""
    return store_process(
        here,
        **{
            "node": name,
            "shm_dir": str(here.shm(f"host-{name}")),
            "dram_bytes": 64 * SLOT,
            "slab_bytes": 64 * SLOT,
            **values,
        },
    )


async def follow(worker: Worker) -> Copies:
    copies = Copies()
    await BlockFollower(worker.node, copies).start()
    return copies


async def read_all(
    worker: Worker, copies: Copies, store: str, chain: Sequence[BlockKey]
) -> None:
    memory = Memory()
    outcomes = await worker.read(copies.located(store, chain), memory)
    assert [outcome.ok for outcome in outcomes] == [True] * len(chain)
    assert all(memory.holds(i, key) for i, key in enumerate(chain))


async def test_blocks_are_listed_shown_pinned_and_removed(here: World) -> None:
    chain = keys(6)
    async with node(here, "a"):
        worker = await here.linked_worker("w", "host-a")
        await worker.store_blocks(chain)
        listed: Any = {"blocks": []}
        async with asyncio.timeout(30):
            while len(listed["blocks"]) < len(chain):
                listed = await answer(here, "blocks", "list")
        listed = await answer(here, "blocks", "list", "--tenant", "t", "--node", "a")
        assert listed["source"] == "catalog"
        assert {each["key"] for each in listed["blocks"]} == {k.hex() for k in chain}
        assert {each["tenant"] for each in listed["blocks"]} == {"t"}
        # the database is away: the stores themselves are asked
        gone = f"sqlite:///{here.folder}/none.sqlite3"
        live = await answer(here, "blocks", "list", "--catalog", gone, "--limit", "4")
        assert (live["source"], len(live["blocks"])) == ("stores", 4)
        assert "no catalog" in live["note"]
        first = chain[0].hex()
        code, out = await kvtide(here, "blocks", "pin", first, "--hard")
        assert (code, out.strip()) == (0, "a: 1 of 1 blocks pinned")
        shown = await answer(here, "blocks", "show", first)
        assert [each["pinned"] for each in shown["blocks"]] == ["hard"]
        code, out = await kvtide(here, "blocks", "unpin", "--tenant", "t")
        assert code == 0, out
        # nobody is there to be asked
        code, out = await kvtide_process(here, "blocks", "remove", "--tenant", "t")
        assert code == 1
        assert "Remove 6 blocks, 6 copies" in out
        assert "--yes" in out
        code, out = await kvtide(here, "blocks", "remove")
        assert code == 2
        code, out = await kvtide(here, "blocks", "remove", "--tenant", "t", "--yes")
        assert (code, out.strip()) == (0, "a: 6 of 6 blocks removed, 6 copies")
        async with asyncio.timeout(20):
            while "went from a (dram)" not in out:
                _, out = await kvtide(here, "blocks", "show", first)
        assert "removed" in out
        assert await why_gone(here) == [("removed", 6)]


async def test_blocks_are_named_by_how_their_keys_begin(here: World) -> None:
    chain = keys(6)
    first = chain[0].hex()
    async with node(here, "a"):
        worker = await here.linked_worker("w", "host-a")
        await worker.store_blocks(chain)
        begin = 1
        while any(each.hex().startswith(first[:begin]) for each in chain[1:]):
            begin += 1
        for away in ((), ("--cluster", "elsewhere")):
            # once from the store, once from the catalog
            async with asyncio.timeout(30):
                code, out = 75, ""
                while code != 0:
                    words = ("blocks", "show", first[:begin], *away)
                    code, out = await kvtide(here, *words)
            assert out.count(first) == 1
        code, out = await kvtide(here, "blocks", "show", first[: begin - 1] or "f0f0f0")
        assert code == 2
        assert "begin" in out
        code, out = await kvtide(here, "blocks", "show", "f" * 20)
        assert code == 2
        assert "no block's key begins" in out
        # a pipe is no terminal: a key is whole however narrow it is
        code, out = await kvtide_process(here, "blocks", "list", columns="40")
        assert all(key.hex() in out for key in chain), out
        for source in ("catalog", "stores"):
            words = ("blocks", "list", "--node", "nobody", "--source", source)
            code, out = await kvtide(here, *words)
            assert code == 2
            assert "those that are: a" in out


async def why_gone(here: World) -> list[tuple[str, int]]:
    words = ["blocks", "history", "--state-dir", str(here.folder / "state"), "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, app, words)
    told = json.loads(result.output)
    assert told["hits"] == []
    return [(each["reason"], each["blocks"]) for each in told["removals"]]


async def test_a_store_is_drained_by_its_name(here: World) -> None:
    chain = keys(30)
    async with node(here, "a") as first, node(here, "b"):
        worker = await here.linked_worker("w", "host-a")
        copies = await follow(worker)
        await worker.store_blocks(chain)
        await until(lambda: set(copies.at("a")) == set(chain), "told")
        code, out = await kvtide(here, "drain", "nobody")
        assert code == 75
        assert "a, b" in out
        code, out = await kvtide_process(here, "drain", "a")
        assert code == 0, out
        assert "30 moved" in out
        assert out.strip().endswith("a has left")
        async with asyncio.timeout(20):
            assert await first.process.wait() == 0
        assert list(here.shm("host-a").iterdir()) == []
        await read_all(worker, copies, "b", chain)


@pytest.mark.full  # test_store_drain.py has it without the command
async def test_a_drain_without_room_says_so_and_serves_on(here: World) -> None:
    chain = keys(10)
    small = {"dram_bytes": 4 * SLOT + 4096, "slab_bytes": 4 * SLOT}
    async with node(here, "a") as first, node(here, "b", **small):
        worker = await here.linked_worker("w", "host-a")
        copies = await follow(worker)
        await worker.store_blocks(chain)
        await until(lambda: set(copies.at("a")) == set(chain), "told")
        code, out = await kvtide(here, "drain", "a")
        assert code == 1
        assert "no other store has room for 6 blocks" in out
        assert "--cancel" in out
        assert first.process.returncode is None
        await read_all(worker, copies, "a", chain)
        code, out = await kvtide(here, "drain", "a", "--cancel")
        assert (code, out.strip()) == (0, "a stays")
        code, out = await kvtide(here, "drain", "a", "--force")
        assert code == 0
        async with asyncio.timeout(20):
            assert await first.process.wait() == 0


async def test_a_peer_that_is_killed_in_mid_drain_costs_nothing(here: World) -> None:
    chain = keys(40)
    slow = {"replica_bytes_per_s": 25 * SLOT, "replica_reads": 2}
    async with (
        node(here, "a") as first,
        node(here, "b", **slow) as second,
        node(here, "c", **slow) as third,
    ):
        worker = await here.linked_worker("w", "host-a")
        copies = await follow(worker)
        await worker.store_blocks(chain)
        await until(lambda: set(copies.at("a")) == set(chain), "told")
        await until(lambda: len(worker.node.roster.live()) >= 4, "all stores are known")
        code, out = await kvtide(here, "drain", "a", "--no-wait")
        assert code == 0, out
        await until(
            lambda: min(len(copies.at("b")), len(copies.at("c"))) >= 3, "both take some"
        )
        assert len(copies.at("b")) < 20
        assert await second.end(signal.SIGKILL) == -signal.SIGKILL
        async with asyncio.timeout(60):
            assert await first.process.wait() == 0
        assert third.process.returncode is None
        await read_all(worker, copies, "c", chain)
