"""Odd chunks, shared steps, too little memory, many cancels: the tokens stay the same.

One process does both roles, with room for six blocks of KV, and is judged by what
transformers computes from the same weights.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.integration.cluster import Cluster
from tests.integration.pretended_gateway import (
    LIMIT_S,
    WORKER,
    Asked,
    PretendedGateway,
    lone_worker,
    pretended_gateway,
)
from tokenizers import Tokenizer

from kvtide.bus.messages import (
    Ack,
    ChangeRoles,
    DecodeLoad,
    Message,
    PrefillLoad,
    SamplingSpec,
)
from kvtide.engine.demo import default_cache_dir, ensure_demo_model
from kvtide.kv import Role

pytestmark = pytest.mark.timeout(600)

BLOCK = 64
SETTINGS: dict[str, object] = {
    "chunk_tokens": 37,
    "shared_chunk_tokens": 23,
    "kv_tokens": 6 * BLOCK,
    "growth_blocks": 0,
}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(ensure_demo_model(default_cache_dir()))


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    folder = ensure_demo_model(default_cache_dir())
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    folder = tmp_path_factory.mktemp("odd")
    with Cluster(
        folder, prefill=0, decode=0, workers=1, settings={"worker": SETTINGS}
    ) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncGenerator[PretendedGateway]:
    async with pretended_gateway(cluster, WORKER) as gateway:
        yield gateway


async def send(
    gateway: PretendedGateway,
    prompt: list[int],
    tokens: int,
    sampling: SamplingSpec | None = None,
) -> Asked:
    return await gateway.send(
        prompt, tokens, prefill=WORKER, decode=WORKER, sampling=sampling
    )


def prompt_of(text: Tokenizer, tokens: int, first: int) -> list[int]:
    return text_tokens(lambda part: text.encode(part).ids, tokens, first)


async def loads(gateway: PretendedGateway) -> tuple[PrefillLoad, DecodeLoad]:
    beat = (await gateway.member(WORKER, ready=False)).beat
    prefill = next(one for one in beat.load if isinstance(one, PrefillLoad))
    decode = next(one for one in beat.load if isinstance(one, DecodeLoad))
    return prefill, decode


async def nothing_is_held(gateway: PretendedGateway) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            prefill, decode = await loads(gateway)
            left = (prefill.queued, prefill.running, decode.waiting, decode.running)
            if (*left, decode.kv_tokens_used) == (0, 0, 0, 0, 0):
                return
            await asyncio.sleep(0.05)


async def test_preempted_answers_go_on_with_the_same_tokens(
    gateway: PretendedGateway, oracle: Oracle, text: Tokenizer
) -> None:
    before = (await loads(gateway))[1].preempted
    drawn = SamplingSpec(temperature=1.0, seed=7)
    # each begins with a block or two, soon wants another, and six are all
    lengths = (1, 50, 56, BLOCK - 1, BLOCK, BLOCK + 1)
    prompts = [prompt_of(text, n, 100 * i) for i, n in enumerate(lengths)]
    last = len(prompts) - 1
    asked = [
        await send(gateway, prompt, 24, drawn if i == last else None)
        for i, prompt in enumerate(prompts)
    ]
    for one in asked:
        await gateway.finished(one)
    decode = (await loads(gateway))[1]
    assert decode.preempted > before, "there was too little memory for all"
    assert decode.step is not None
    assert decode.busy_share > 0
    for one in asked[:last]:
        assert oracle.check(one.prompt, one.ids).right
    alone = await gateway.finished(await send(gateway, prompts[last], 24, drawn))
    assert alone.ids == asked[last].ids
    await nothing_is_held(gateway)


async def test_32_in_flight_of_which_some_are_cancelled(
    gateway: PretendedGateway, oracle: Oracle, text: Tokenizer
) -> None:
    prompts = [prompt_of(text, 5 + i // 2, 1000 + 10 * i) for i in range(32)]
    asked = [await send(gateway, prompt, 6) for prompt in prompts]
    kept = [one for i, one in enumerate(asked) if i % 3]
    for i, one in enumerate(asked):
        if i % 3 == 0 and not one.ended:
            await gateway.until(kept[i // 3], lambda one=kept[i // 3]: one.ids)
            await gateway.cancel(one)
    for one in kept:
        await gateway.finished(one)
        assert oracle.check(one.prompt, one.ids).right
    await nothing_is_held(gateway)


async def test_a_prompt_longer_than_memory_is_refused_before_any_work(
    gateway: PretendedGateway, text: Tokenizer
) -> None:
    with pytest.raises(AssertionError, match="too_large"):
        await gateway.send(
            prompt_of(text, 7 * BLOCK, 0), 4, prefill=None, decode=WORKER
        )
    gateway.open.clear()
    await nothing_is_held(gateway)


async def test_a_worker_leaves_a_role_and_takes_it_again(
    gateway: PretendedGateway, oracle: Oracle, text: Tokenizer
) -> None:
    async def change(*roles: Role) -> Message:
        worker = await gateway.member(WORKER)
        inbox = gateway.node.subjects.inbox(Role.DECODE, worker.node, "control")
        message = ChangeRoles(worker=worker.ref, roles=roles)
        return await gateway.node.bus.request(inbox, message, timeout_s=5)

    async def offered(*roles: Role) -> None:
        async with asyncio.timeout(LIMIT_S):
            while set((await gateway.member(WORKER)).beat.roles) != set(roles):  # noqa: ASYNC110 - beats come by themselves
                await asyncio.sleep(0.02)

    prompt = prompt_of(text, 40, 5000)
    running = await send(gateway, prompt, 20)
    assert isinstance(await change(Role.PREFILL), Ack)
    await offered(Role.PREFILL)
    with pytest.raises(AssertionError, match="draining"):
        await send(gateway, prompt, 4)
    gateway.open = {running.ref: running}
    await gateway.finished(running)  # what it had goes on to its end
    assert oracle.check(running.prompt, running.ids).right
    assert isinstance(await change(Role.PREFILL, Role.DECODE), Ack)
    await offered(Role.PREFILL, Role.DECODE)
    await gateway.finished(await send(gateway, prompt, 4))
    await nothing_is_held(gateway)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [1, 16, 64, 100, 2048])
async def test_any_chunk_size_gives_the_same_tokens(
    tmp_path: Path, oracle: Oracle, text: Tokenizer, chunk: int
) -> None:
    settings: dict[str, object] = {"chunk_tokens": chunk, "kv_tokens": 4096}
    async with lone_worker(tmp_path / "chunks", {"worker": settings}) as (_, gateway):
        for tokens in (2, 63, 64, 65, 200, 700):
            prompt = prompt_of(text, tokens, 7 * tokens)
            asked = await gateway.finished(await send(gateway, prompt, 24))
            assert oracle.check(prompt, asked.ids).right
        await nothing_is_held(gateway)
