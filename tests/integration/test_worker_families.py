"""Every family, served by a real worker: odd chunks, every tier, preemption, cancels.

Judged by what transformers computes from the same small random weights, in float32.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from tests.e2e.oracle.reference import Oracle, OracleVerdict, tie_share
from tests.integration.cluster import Cluster
from tests.integration.family_models import VARIANTS, make_model
from tests.integration.pretended_gateway import (
    LIMIT_S,
    WORKER,
    Asked,
    PretendedGateway,
    lone_worker,
)

from kvtide.bus.messages import DecodeLoad, PrefillLoad, StoreLoad
from kvtide.kv import Located, NodeId, Tier

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

BLOCK = 64
VOCAB = 300
L = TypeVar("L", PrefillLoad, DecodeLoad, StoreLoad)
TIES = 0.02
"""Logits of small random models lie closer together than those of trained ones."""


class Served:
    """A worker of one model, and the judge of its answers."""

    def __init__(
        self, cluster: Cluster, gateway: PretendedGateway, oracle: Oracle
    ) -> None:
        self.cluster = cluster
        self.gateway = gateway
        self._oracle = oracle
        self._noise = random.Random(11)  # noqa: S311 - it repeats
        self.verdicts: list[OracleVerdict] = []

    def text(self, tokens: int) -> list[int]:
        return [self._noise.randrange(3, VOCAB) for _ in range(tokens)]

    async def send(
        self, prompt: list[int], tokens: int, reuse: tuple[Located, ...] = ()
    ) -> Asked:
        return await self.gateway.send(
            prompt, tokens, prefill=WORKER, decode=WORKER, reuse=reuse
        )

    async def right(self, asked: Asked) -> Asked:
        """Wait for its end, and judge it."""
        await self.gateway.finished(asked)
        verdict = self._oracle.check(asked.prompt, asked.ids)
        assert verdict.right, verdict
        self.verdicts.append(verdict)
        return asked

    async def reused(
        self, prefix: list[int], copies: tuple[Located, ...], more: int
    ) -> None:
        """Ask for something after ``prefix``, of which these copies are there.

        Prefill loads or computes, whichever it has measured to be faster; decode alone
        reads them all.
        """
        await self.right(await self.send([*prefix, *self.text(more)], 8, copies))
        asked = await self.gateway.send(
            [*prefix, *self.text(more)], 8, prefill=None, decode=WORKER, reuse=copies
        )
        await self.right(asked)
        assert asked.reused_tokens == BLOCK * len(copies)

    async def load(self, name: str, kind: type[L]) -> L:
        """What it reports now."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                member = await self.gateway.member(name, ready=False)
                for one in member.beat.load:
                    if isinstance(one, kind):
                        return one
                await asyncio.sleep(0.02)

    async def only_on_ssd(self, prefix: list[int], blocks: int) -> None:
        """Kill the store when it has written all there, and start it again."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                load = await self.load("store-0", StoreLoad)
                if load.ssd_blocks >= max(blocks, load.used_slots):
                    break
                await asyncio.sleep(0.05)
        self.cluster.kill("store-0")
        await self.gateway.gone("store-0")
        self.cluster.restart("store-0")
        for name in ("store-0", WORKER):
            await self.gateway.member(name)
        await self.gateway.pooled(prefix, blocks)

    async def nothing_is_held(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while True:
                prefill = await self.load(WORKER, PrefillLoad)
                decode = await self.load(WORKER, DecodeLoad)
                left = (prefill.queued, prefill.running, decode.waiting)
                if (*left, decode.running, decode.kv_tokens_used) == (0, 0, 0, 0, 0):
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def served(folder: Path, family: str, **worker: object) -> AsyncGenerator[Served]:
    model = folder / "model"
    make_model(next(one for one in VARIANTS if one.name == family), model)
    ssd: dict[str, object] = {
        "ssd_bytes": 64 << 20,
        "ssd_segment_bytes": 4 << 20,
        "ssd_dir": str(folder / "ssd"),
        "ssd_flush_s": 0.2,
        "ssd_save_s": 0.2,
    }
    settings = {"store": ssd, "worker": {"model": str(model), **worker}}
    async with lone_worker(folder / family, settings) as (cluster, gateway):
        yield Served(cluster, gateway, Oracle(model))


@pytest.mark.parametrize("chunk", [1, 37, 64, 2048])
@pytest.mark.parametrize("family", [one.name for one in VARIANTS])
async def test_any_chunks_and_any_tier(tmp_path: Path, family: str, chunk: int) -> None:
    async with served(tmp_path, family, chunk_tokens=chunk) as world:
        for tokens in (2, BLOCK - 1, BLOCK, BLOCK + 1, 333):
            await world.right(await world.send(world.text(tokens), 12))
        prefix = world.text(4 * BLOCK)
        await world.right(await world.send([*prefix, 7], 2))
        memory = await world.gateway.pooled(prefix, 4)
        assert {copy.slot.tier for copy in memory} == {Tier.DRAM}
        await world.reused(prefix, memory, 40)
        await world.reused(prefix[: 2 * BLOCK], memory[:2], 3)
        await world.only_on_ssd(prefix, 4)
        disk = await world.gateway.pooled(prefix, 4)
        assert {copy.slot.tier for copy in disk} == {Tier.SSD}
        await world.reused(prefix, disk, 40)
        # two blocks more, which are in memory, after those that were on the SSD
        longer = [*prefix, *world.text(2 * BLOCK)]
        await world.right(await world.send([*longer, 7], 2, disk))
        mixed = await world.gateway.pooled(longer, 6)
        await world.reused(longer, (*disk, *mixed[4:]), 20)
        # one copy is not what its descriptor says: that block is computed
        nobody = msgspec.structs.replace(memory[1].slot, node=NodeId("nobody"))
        gone = msgspec.structs.replace(disk[1], slot=nobody)
        asked = await world.send(
            [*prefix, *world.text(9)], 8, (disk[0], gone, *disk[2:])
        )
        await world.right(asked)
        await world.nothing_is_held()
        assert tie_share(world.verdicts) <= TIES


@pytest.mark.parametrize("chunk", [1, 37, 2048])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
async def test_preempted_and_cancelled_among_32(
    tmp_path: Path, family: str, chunk: int
) -> None:
    limits = {"chunk_tokens": chunk, "kv_tokens": 6 * BLOCK, "growth_blocks": 0}
    async with served(tmp_path, family, **limits) as world:
        prompts = [world.text(n) for n in (1, 50, 56, BLOCK - 1, BLOCK, BLOCK + 1)]
        asked = [await world.send(prompt, 40) for prompt in prompts]
        for one in asked:
            await world.right(one)
        preempted = (await world.load(WORKER, DecodeLoad)).preempted
        assert preempted > 0, "there was too little memory for all"
        flight = [await world.send(world.text(5 + 3 * i), 12) for i in range(32)]
        for i, one in enumerate(flight):
            if i % 3 == 0 and not one.ended:
                await world.gateway.cancel(one)
        for i, one in enumerate(flight):
            if i % 3:
                await world.right(one)
        await world.nothing_is_held()
        assert tie_share(world.verdicts) <= TIES
