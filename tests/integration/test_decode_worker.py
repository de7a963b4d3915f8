"""Prefill and decode in one process, on one model and one engine thread; its ends."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.integration.cluster import Cluster
from tests.integration.pretended_gateway import (
    WORKER,
    PretendedGateway,
    pretended_gateway,
)
from tokenizers import Tokenizer

from kvtide.bus.messages import Presence, PresenceReply
from kvtide.engine.demo import default_cache_dir, ensure_demo_model
from kvtide.kv import Located, Role

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    folder = tmp_path_factory.mktemp("worker")
    with Cluster(folder, prefill=0, decode=0, workers=1) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncGenerator[PretendedGateway]:
    async with pretended_gateway(cluster, WORKER) as gateway:
        yield gateway


async def test_decode_goes_on_beside_a_prefill_in_the_same_process(
    cluster: Cluster, gateway: PretendedGateway
) -> None:
    folder = ensure_demo_model(default_cache_dir())
    text = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(part: str) -> list[int]:
        return text.encode(part).ids

    running = await gateway.send(
        text_tokens(encode, 50, 0), 40, prefill=WORKER, decode=WORKER
    )
    await gateway.until(running, lambda: running.ids)
    long = await gateway.send(
        text_tokens(encode, 600, 30), 8, prefill=WORKER, decode=WORKER
    )
    before = len(running.ids)
    await gateway.until(long, lambda: long.prefill_done is not None)
    between = len(running.ids) - before
    await gateway.finished(running)
    await gateway.finished(long)
    assert between >= 2, "tokens came while the other's prompt was computed in chunks"
    oracle = Oracle(folder)
    for asked in (running, long):
        assert oracle.check(asked.prompt, asked.ids).right
    assert long.prefill_done is not None
    assert long.prefill_done.computed_tokens == 599
    del cluster


async def test_a_stop_lets_running_requests_end_and_leaves_with_0(
    cluster: Cluster, gateway: PretendedGateway
) -> None:
    asked = await gateway.send(list(range(200, 260)), 24, prefill=WORKER, decode=WORKER)
    await gateway.until(asked, lambda: asked.ids)
    cluster["worker-0"].send(signal.SIGTERM)
    await gateway.finished(asked)
    assert len(asked.ids) == 24
    code = await asyncio.to_thread(cluster["worker-0"].wait)
    assert code == 0, cluster.tail(cluster["worker-0"])


async def test_between_hosts_everything_goes_over_tcp(
    tmp_path: Path,
) -> None:
    folder = ensure_demo_model(default_cache_dir())
    text = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = text_tokens(lambda part: text.encode(part).ids, 200, 60)
    with Cluster(tmp_path / "hosts", prefill=1, decode=0, hosts=2) as cluster:
        cluster.add("decode", 1)  # on the other host
        await asyncio.to_thread(cluster.wait_ready)
        async with pretended_gateway(cluster) as gateway:
            hosts = {
                name: (await gateway.member(name)).beat.host
                for name in ("store-0", "store-1", "prefill-0", "decode-1")
            }
            assert hosts["prefill-0"] == hosts["store-0"] != hosts["store-1"]
            assert hosts["decode-1"] == hosts["store-1"]
            cold = await gateway.ask(ids, 60, decode="decode-1")
            assert Oracle(folder).check(ids, cold.ids).right
            copies = await gateway.pooled(ids, 3, "store-0")
            warm = await gateway.ask(ids, 8, decode="decode-1", reuse=copies)
            assert warm.ids == cold.ids[:8]
            assert warm.reused_tokens == 192
            # a prefix whose blocks are on two hosts
            longer = [*ids, *cold.ids, *ids[:40]]
            there = await _only(gateway, longer, 3, "store-1")
            both = await gateway.ask(
                longer, 8, decode="decode-1", reuse=(*copies, there)
            )
            assert Oracle(folder).check(longer, both.ids).right
            assert both.reused_tokens == 256
            # what decode completed went to the store on its own host
            history = [*ids, *cold.ids]
            assert await gateway.located(history, "store-1") == ()
            beat = (await gateway.member("store-1")).beat
            assert [load.used_slots for load in beat.load] == [1]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


async def _only(
    gateway: PretendedGateway, tokens: list[int], block: int, store: str
) -> Located:
    """Wait until a store has this block of ``tokens``."""
    inbox = gateway.node.subjects.inbox(
        Role.STORE, (await gateway.member(store)).node, "query"
    )
    asked = Presence(keys=(gateway.keys(tokens)[block],))
    async with asyncio.timeout(60):
        while True:
            reply = await gateway.node.bus.request(inbox, asked, timeout_s=5)
            assert isinstance(reply, PresenceReply)
            if reply.located:
                return reply.located[0]
            await asyncio.sleep(0.05)


def test_a_model_that_cannot_be_served_ends_the_process_with_the_reason(
    tmp_path: Path,
) -> None:
    missing = {"prefill": {"model": str(tmp_path / "none")}}
    with Cluster(tmp_path / "c", stores=1, decode=0, settings=missing) as cluster:
        code = cluster["prefill-0"].wait(60)
        assert code != 0
        log = cluster.tail(cluster["prefill-0"])
    assert "ConfigError" in log
    assert "there is no such folder" in log
