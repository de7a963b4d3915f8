"""Prefill to decode between real processes: NATS, store and the demo model are real.

Every answer is compared with what transformers generates from the same weights.
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
    Asked,
    PretendedGateway,
    pretended_gateway,
)
from tokenizers import Tokenizer

from kvtide.bus import Hop, Incoming
from kvtide.bus.messages import HandoverPlan, SamplingSpec
from kvtide.engine.demo import default_cache_dir, ensure_demo_model
from kvtide.kv import NodeId, Role

pytestmark = pytest.mark.timeout(900)

BLOCK = 64
DRAM_BYTES = 320 << 20
"""Some 110 blocks: few enough that freed slots are soon used again."""
OTHERS = 30


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_demo_model(default_cache_dir())


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def text(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("handover"),
        prefill=2,
        decode=1,
        settings={"store": {"dram_bytes": DRAM_BYTES}},
    ) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncGenerator[PretendedGateway]:
    names = ("prefill-0", "prefill-1", "decode-0", "store-0")
    async with pretended_gateway(cluster, *names) as gateway:
        yield gateway


def prompt(text: Tokenizer, tokens: int, first: int) -> list[int]:
    return text_tokens(lambda part: text.encode(part).ids, tokens, first)


def right(oracle: Oracle, asked: Asked, tokens: int) -> None:
    assert len(asked.ids) == tokens
    verdict = oracle.check(asked.prompt, asked.ids)
    assert verdict.right, verdict


async def settled(cluster: Cluster, gateway: PretendedGateway) -> None:
    """Wait until workers and store hold nothing for anybody."""

    def held() -> str:
        decode = cluster["decode-0"].metrics()
        store = gateway.node.roster.get(NodeId("store-0"))
        load = store.beat.load[0] if store else None
        used = decode['kvtide_decode_load{what="kv_tokens_used"}']
        return f"decode {used}, store {load}" if used or _held(load) else ""

    async with asyncio.timeout(LIMIT_S):
        while held():
            await gateway.node.clock.sleep(0.1)


def _held(load: object) -> int:
    return sum(
        getattr(load, field, 0) for field in ("leases", "pins", "reserved_slots")
    )


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 129, 700])
async def test_cold_answers_are_the_references(
    gateway: PretendedGateway, text: Tokenizer, oracle: Oracle, tokens: int
) -> None:
    ids = prompt(text, tokens, 1000 + tokens)
    asked = await gateway.ask(ids, 12)
    right(oracle, asked, 12)
    assert asked.reused_tokens == 0
    done = asked.prefill_done
    assert done is not None
    assert (done.reused_tokens, done.computed_tokens) == (0, tokens - 1)


async def test_a_long_prompt_then_a_warm_one_then_the_next_turn(
    cluster: Cluster, gateway: PretendedGateway, text: Tokenizer, oracle: Oracle
) -> None:
    ids = prompt(text, 2000, 0)
    cold = await gateway.ask(ids, 48)
    right(oracle, cold, 48)
    copies = await gateway.pooled(ids, 2000 // BLOCK)
    warm = await gateway.ask(ids, 8, reuse=copies, prefill="prefill-1")
    assert warm.ids == cold.ids[:8]
    assert warm.reused_tokens == 2000 // BLOCK * BLOCK
    assert warm.prefill_done is not None
    assert warm.prefill_done.computed_tokens == 1999 - 2000 // BLOCK * BLOCK
    turn = [*ids, *cold.ids, *prompt(text, 20, 50)]
    # every full block of prompt and answer, the last of which the last token fills
    history = await gateway.pooled(turn, (2000 + 48) // BLOCK)
    again = await gateway.ask(turn, 8, reuse=history)
    right(oracle, again, 8)
    assert again.reused_tokens == len(history) * BLOCK
    await settled(cluster, gateway)


async def test_all_of_the_prompt_in_the_pool_needs_no_prefill(
    gateway: PretendedGateway, text: Tokenizer, oracle: Oracle
) -> None:
    ids = prompt(text, 128, 300)
    first = await gateway.ask(ids, 2)
    # decode completes the prompt's last block and pools it
    copies = await gateway.pooled(ids, 2)
    asked = await gateway.ask(ids, 8, reuse=copies, prefill=None)
    right(oracle, asked, 8)
    assert asked.ids[:2] == first.ids
    assert asked.reused_tokens == 127


async def test_what_others_made_meanwhile_is_found_though_nobody_said_so(
    gateway: PretendedGateway, text: Tokenizer, oracle: Oracle
) -> None:
    ids = prompt(text, 200, 350)
    first = await gateway.ask(ids, 8)
    right(oracle, first, 8)
    again = await gateway.ask(ids, 8, prefill="prefill-1")
    assert again.ids == first.ids
    assert again.reused_tokens == 192
    assert again.prefill_done is not None
    assert again.prefill_done.computed_tokens == 7


async def test_a_prefix_that_several_wait_for_is_computed_once(
    gateway: PretendedGateway, text: Tokenizer, oracle: Oracle
) -> None:
    prefix = prompt(text, 256, 370)
    sent = [
        await gateway.send([*prefix, *prompt(text, 10, 600 + number)], 8)
        for number in range(3)
    ]
    computed: list[int] = []
    for asked in sent:
        right(oracle, await gateway.finished(asked), 8)
        assert asked.prefill_done is not None
        computed.append(asked.prefill_done.computed_tokens)
    assert computed == [265, 9, 9]
    assert [asked.reused_tokens for asked in sent] == [0, 256, 256]


async def test_eight_in_flight_and_cancels_among_them(
    cluster: Cluster, gateway: PretendedGateway, text: Tokenizer, oracle: Oracle
) -> None:
    sent = [
        await gateway.send(
            prompt(text, 20 + 37 * number, 400 + 11 * number),
            24,
            prefill=f"prefill-{number % 2}",
        )
        for number in range(8)
    ]
    for asked in (sent[2], sent[5]):
        await gateway.until(asked, lambda asked=asked: len(asked.ids) > 1)
        await gateway.cancel(asked)
    for number, asked in enumerate(sent):
        if number not in (2, 5):
            right(oracle, await gateway.finished(asked), 24)
    await settled(cluster, gateway)


async def test_seeded_sampling_does_not_depend_on_the_batch(
    gateway: PretendedGateway, text: Tokenizer
) -> None:
    sampling = SamplingSpec(temperature=0.9, top_p=0.95, seed=7)
    ids = prompt(text, 40, 700)
    alone = await gateway.ask(ids, 16, sampling=sampling)
    together = [
        await gateway.send(ids, 16, sampling=sampling),
        await gateway.send(prompt(text, 90, 720), 16),
    ]
    for asked in together:
        await gateway.finished(asked)
    assert together[0].ids == alone.ids


async def test_what_a_gone_gateway_owned_is_freed(
    cluster: Cluster, gateway: PretendedGateway, text: Tokenizer
) -> None:
    async with pretended_gateway(
        cluster, "prefill-0", "decode-0", name="gateway-gone"
    ) as leaving:
        asked = await leaving.send(prompt(text, 300, 750), 2000)
        await leaving.until(asked, lambda: asked.ids)
    await settled(cluster, gateway)


async def test_a_lost_cancel_is_made_good_by_the_owner_list(
    cluster: Cluster, gateway: PretendedGateway, text: Tokenizer
) -> None:
    asked = await gateway.send(prompt(text, 100, 770), 2000)
    await gateway.until(asked, lambda: asked.ids)
    del gateway.open[asked.ref]  # the next lists miss it, and no cancel was sent
    await settled(cluster, gateway)


async def computing(
    cluster: Cluster, gateway: PretendedGateway, name: str, asked: Asked
) -> None:
    """Wait until parts of it were handed over, and not all."""

    def read(kind: str) -> float:
        name = f'kvtide_decode_reads_total{{kind="{kind}",outcome="read"}}'
        return cluster["decode-0"].metrics().get(name, 0.0)

    before = read("part")
    async with asyncio.timeout(LIMIT_S):
        while read("part") < before + 2:
            await gateway.node.clock.sleep(0.02)
    assert asked.prefill_done is None
    assert not asked.ids, name


async def plans_of(gateway: PretendedGateway) -> dict[str, set[int]]:
    """Overhear which slots each request's new KV goes to, by request."""
    plans: dict[str, set[int]] = {}

    async def overhear(incoming: Incoming) -> None:
        if isinstance(incoming.message, HandoverPlan):
            slots = {one.slot.offset for one in incoming.message.slots}
            plans.setdefault(incoming.message.request, set()).update(slots)

    bus = gateway.node.bus
    inbox = bus.subjects.inbox(Role.DECODE, NodeId("decode-0"), Hop.HANDOVER)
    await bus.subscribe(inbox, overhear)
    return plans


async def test_prefill_stopped_in_a_layer_and_continued_harms_nobody(
    cluster: Cluster, gateway: PretendedGateway, text: Tokenizer, oracle: Oracle
) -> None:
    plans = await plans_of(gateway)
    asked = await gateway.send(prompt(text, 1800, 800), 4)
    await computing(cluster, gateway, "prefill-0", asked)
    cluster.pause("prefill-0")
    await gateway.cancel(asked, wait=False)
    await gateway.gone("prefill-0")
    stopped = plans[asked.ref.request]
    # others come until the slots that the stopped worker was filling are theirs
    sent: list[Asked] = []
    while not any(plans.get(one.ref.request, set()) & stopped for one in sent):
        assert len(sent) < OTHERS
        ids = prompt(text, 300, 900 + 20 * len(sent))
        sent.append(await gateway.send(ids, 8, prefill="prefill-1"))
        async with asyncio.timeout(LIMIT_S):
            while sent[-1].ref.request not in plans:
                await gateway.node.clock.sleep(0.02)
    cluster.resume("prefill-0")
    for one in sent:
        right(oracle, await gateway.finished(one), 8)
    await gateway.member("prefill-0")
    after = await gateway.ask(prompt(text, 300, 990), 8)
    right(oracle, after, 8)
    assert after.prefill_done is not None
    await settled(cluster, gateway)


async def test_prefill_killed_while_it_computes_is_computed_by_decode(
    cluster: Cluster, gateway: PretendedGateway, text: Tokenizer, oracle: Oracle
) -> None:
    asked = await gateway.send(prompt(text, 1500, 1100), 8)
    await computing(cluster, gateway, "prefill-0", asked)
    cluster.kill("prefill-0")
    await gateway.finished(asked)
    right(oracle, asked, 8)
    assert asked.prefill_done is None
    await settled(cluster, gateway)
