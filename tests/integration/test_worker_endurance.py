"""A real worker under a long mixed load with cancellations: nothing grows, nothing stays.

Its memory, threads, open files and mappings are looked at all the time, and so is what
it and its store say that they hold.
"""

import asyncio
import random
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
import pytest
from tests.integration.pretended_gateway import (
    LIMIT_S,
    WORKER,
    Asked,
    PretendedGateway,
    lone_worker,
)

from kvtide.bus.messages import (
    DecodeLoad,
    GrammarLanguage,
    GrammarSpec,
    PrefillLoad,
    SamplingSpec,
    StoreLoad,
)
from kvtide.runtime import TaskScope

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

BLOCK = 64
KV_TOKENS = 7 * BLOCK
STORE_BYTES = 64 << 20
"""Soon full: what comes later evicts."""
FLAT_BYTES = 24 << 20
"""Half of what one more copy of the KV memory of either role would take."""


@dataclass
class Watch:
    """What was seen of the worker, a few times a second."""

    gateway: PretendedGateway
    process: psutil.Process
    rss: list[int] = field(default_factory=list[int])
    most_used: int = 0

    async def look(self) -> None:
        while True:
            prefill, decode, store = await self.loads()
            assert 0 <= decode.kv_tokens_used <= decode.kv_tokens_capacity
            assert decode.kv_tokens_used % BLOCK == 0
            assert prefill.queued + prefill.running <= 64
            slots = store.free_slots + store.used_slots
            slots += store.reserved_slots + store.quarantined_slots
            assert slots == store.total_slots
            self.most_used = max(self.most_used, decode.kv_tokens_used)
            self.rss.append(self.process.memory_info().rss)
            await asyncio.sleep(0.2)

    async def loads(self) -> tuple[PrefillLoad, DecodeLoad, StoreLoad]:
        beat = (await self.gateway.member(WORKER, ready=False)).beat
        prefill = next(one for one in beat.load if isinstance(one, PrefillLoad))
        decode = next(one for one in beat.load if isinstance(one, DecodeLoad))
        beat = (await self.gateway.member("store-0", ready=False)).beat
        store = next(one for one in beat.load if isinstance(one, StoreLoad))
        return prefill, decode, store

    async def nothing_is_held(self) -> None:
        """By the worker, and of it by the store."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                prefill, decode, store = await self.loads()
                left = (prefill.queued, prefill.running, decode.waiting, decode.running)
                held = (decode.kv_tokens_used, decode.kv_tokens_promised)
                stored = (store.leases, store.pins, store.reserved_slots)
                if not any((*left, *held, *stored)):
                    return
                await asyncio.sleep(0.05)

    def kept(self) -> tuple[int, int, int]:
        """Threads, open files, mappings."""
        return (
            self.process.num_threads(),
            self.process.num_fds(),
            len(self.process.memory_maps(grouped=False)),
        )


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncGenerator[Watch]:
    settings: dict[str, dict[str, object]] = {
        "store": {"dram_bytes": STORE_BYTES},
        "worker": {"chunk_tokens": 128, "kv_tokens": KV_TOKENS, "growth_blocks": 0},
    }
    async with lone_worker(tmp_path / "long", settings) as (cluster, gateway):
        yield Watch(gateway, psutil.Process(cluster[WORKER].pid))


class Load:
    """Rounds of requests of many kinds, some of which are given up at some moment."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._noise = random.Random(3)  # noqa: S311 - it repeats
        self._prefix = self._text(3 * BLOCK)

    async def round(self) -> None:
        asked = [await self._send(i) for i in range(8)]
        async with asyncio.TaskGroup() as group:
            for i, one in enumerate(asked):
                group.create_task(self._until_its_end(one, i))

    async def _until_its_end(self, asked: Asked, number: int) -> None:
        gateway = self._watch.gateway
        match number % 4:
            case 0:  # at once
                await gateway.cancel(asked)
            case 1 if number > 4:  # in the middle of the answer
                await gateway.until(asked, lambda: asked.ids or asked.ended)
                if not asked.ended:
                    await gateway.cancel(asked)
            case _:
                await gateway.finished(asked)

    async def _send(self, number: int) -> Asked:
        gateway = self._watch.gateway
        prompt = self._text(self._noise.choice((1, 40, BLOCK, 130, 260)))
        if number % 3 == 0:  # a prefix that others have, too
            prompt = [*self._prefix, *prompt[:60]]
        found = await gateway.located(prompt, "store-0")
        keys = gateway.keys(prompt)
        reuse = [one for one, key in zip(found, keys, strict=False) if one.key == key]
        return await gateway.send(
            prompt,
            self._noise.choice((1, 6, 20)),
            prefill=None if number == 7 else WORKER,
            decode=WORKER,
            reuse=reuse,
            sampling=self._sampling(number),
        )

    def _sampling(self, number: int) -> SamplingSpec:
        seed = self._noise.randrange(1 << 30)
        match number:
            case 1:
                return SamplingSpec(temperature=0.8, top_p=0.9, top_k=40, seed=seed)
            case 2:
                return SamplingSpec(
                    temperature=1.0, seed=seed, repetition_penalty=1.2, logprobs=3
                )
            case 3:
                grammar = GrammarSpec(GrammarLanguage.REGEX, "[a-z ]{200}")
                return SamplingSpec(temperature=1.0, seed=seed, grammar=grammar)
            case _:
                return SamplingSpec(temperature=0)

    def _text(self, tokens: int) -> list[int]:
        return [self._noise.randrange(10, 49_000) for _ in range(tokens)]


async def test_memory_is_flat_and_pages_are_exact(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(watch)
    for _ in range(6):
        await load.round()
    await watch.nothing_is_held()
    before = watch.kept()
    wrong: list[BaseException] = []
    async with TaskScope(on_error=wrong.append) as looking:
        looking.spawn(watch.look(), name="look")
        for number in range(40):
            await load.round()
            if number % 10 == 9:
                await watch.nothing_is_held()
    after = watch.kept()
    assert not wrong
    third = len(watch.rss) // 3
    early, late = median(watch.rss[:third]), median(watch.rss[-third:])
    with capsys.disabled():
        sys.stdout.write(
            f"\nRSS in MiB {[size >> 20 for size in watch.rss[:: third // 8]]}; "
            f"threads, files, mappings {before}, then {after}\n"
        )
    assert watch.most_used > KV_TOKENS // 2
    assert (await watch.loads())[1].preempted > 0
    assert late - early < FLAT_BYTES
    for name, had, has in zip(("threads", "files"), before, after, strict=False):
        assert has <= had + 2, name
    assert after[2] <= before[2] + 64, "mappings"
