"""What a placement is predicted to cost."""

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, Tier
from kvtide.policy import (
    Ask,
    Copy,
    CostModel,
    CostSeeds,
    DecodeWorker,
    PrefillWorker,
    Rates,
    Reuse,
    Routes,
)

BLOCK = 64
BYTES = 1_000_000


def copy_of(number: int, host: str = "near", tier: Tier = Tier.DRAM) -> Copy:
    slot = SlotRef(
        node=NodeId(f"store-{host}"),
        epoch=1,
        tier=tier,
        arena=0,
        offset=number * BYTES,
        length=BYTES,
        generation=1,
    )
    return Copy(Located(BlockKey(number.to_bytes(16, "big")), slot, number), host)


def ask(tokens: int, prefix: tuple[tuple[Copy, ...], ...] = (), new: int = 10) -> Ask:
    return Ask(
        prompt_tokens=tokens,
        max_new_tokens=new,
        block_tokens=BLOCK,
        block_bytes=BYTES,
        prefix=prefix,
    )


def best_of(asked: Ask, rates: Rates, cost: CostModel | None = None) -> Reuse:
    """What a worker on the near host would reuse."""
    cost = cost or CostModel()
    return cost.best_reuse(asked, Routes(cost, asked).to("near"), rates)


def decode(**fields: float) -> DecodeWorker:
    return DecodeWorker(NodeRef(NodeId("d"), 1), "near", **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("prompt_tokens", "blocks"),
    [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (1000, 9)],
)
def test_only_full_blocks_of_the_prompt_without_its_last_token_count(
    prompt_tokens: int, blocks: int
) -> None:
    prefix = tuple((copy_of(i),) for i in range(9))
    assert ask(prompt_tokens, prefix).reusable_blocks == blocks


def test_a_near_dram_copy_is_cheapest_then_near_ssd_and_far_then_far_ssd() -> None:
    cost = CostModel(CostSeeds(remote_share=0.5, ssd_share=0.25))
    rates = Rates(1000, 1e9)
    found = [
        cost.load_ms(ask(65), cost.slowness(copy_of(0, host, tier), "near"), rates)
        for host, tier in [
            ("near", Tier.DRAM),
            ("far", Tier.DRAM),
            ("near", Tier.SSD),
            ("far", Tier.SSD),
        ]
    ]
    assert found == pytest.approx([1.2, 2.2, 4.2, 8.2])


def test_each_block_comes_from_its_cheapest_copy() -> None:
    prefix = (
        (copy_of(0, "far"), copy_of(0, "near")),
        (copy_of(1, "far"),),
        (copy_of(2, "near", Tier.SSD), copy_of(2, "near")),
    )
    reuse = best_of(ask(200, prefix), Rates(1000, 1e9))
    assert [located.slot.node for located in reuse.located] == [
        "store-near",
        "store-far",
        "store-near",
    ]
    assert reuse.located[2].slot.tier is Tier.DRAM
    assert (reuse.hit_tokens, reuse.rest_tokens) == (192, 7)


def test_a_node_without_a_host_shares_memory_with_nobody() -> None:
    cost = CostModel()
    assert cost.slowness(copy_of(0, ""), "") == cost.slowness(copy_of(0, "far"), "near")
    assert cost.slowness(copy_of(0, "near"), "near") == 1


def test_hosts_that_hold_nothing_share_one_route() -> None:
    asked = ask(300, tuple((copy_of(i, "far"),) for i in range(4)))
    routes = Routes(CostModel(), asked)
    assert routes.to("a") is routes.to("b")
    assert routes.to("a").runs != routes.to("far").runs
    assert len(routes.to("far").runs) == 1


def test_computing_beats_a_slow_load() -> None:
    prefix = tuple((copy_of(i, "far"),) for i in range(4))
    fast = Rates(tokens_per_s=1e6, load_bytes_per_s=1e7)
    reuse = best_of(ask(300, prefix), fast)
    assert reuse.located == ()
    assert reuse.rest_tokens == 299


def test_a_dear_block_in_front_of_cheap_ones_is_loaded_too() -> None:
    prefix = ((copy_of(0, "far", Tier.SSD),), *((copy_of(i),) for i in range(1, 4)))
    # near: 1 ms a block; far ssd: 16 ms; computing a block: 10 ms
    seeds = CostSeeds(block_overhead_ms=0.0)
    rates = Rates(tokens_per_s=6400, load_bytes_per_s=1e9)
    reuse = best_of(ask(300, prefix), rates, CostModel(seeds))
    assert len(reuse.located) == 4
    assert reuse.transfer_ms == pytest.approx(16 + 3)


copies = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["near", "far"]), st.sampled_from(list(Tier))),
        min_size=1,
        max_size=3,
    ),
    max_size=8,
)


@settings(deadline=None)
@given(copies, st.integers(1, 700), st.floats(1e2, 1e7), st.floats(1e5, 1e11))
def test_the_best_reuse_is_the_cheapest_of_all_lengths(
    blocks: list[list[tuple[str, Tier]]], tokens: int, pace: float, rate: float
) -> None:
    prefix = tuple(
        tuple(copy_of(i, host, tier) for host, tier in block)
        for i, block in enumerate(blocks)
    )
    cost, asked, rates = CostModel(), ask(tokens, prefix), Rates(pace, rate)
    best = best_of(asked, rates, cost)
    loads = [
        min(cost.load_ms(asked, cost.slowness(copy, "near"), rates) for copy in block)
        for block in prefix
    ]
    totals = [
        sum(loads[:length]) + (asked.kv_tokens - length * BLOCK) / pace * 1000
        for length in range(asked.reusable_blocks + 1)
    ]
    least = min(totals)
    assert best.transfer_ms + best.compute_ms == pytest.approx(least)
    assert [located.key for located in best.located] == [
        block[0].located.key for block in prefix[: len(best.located)]
    ]


def test_a_rate_that_was_measured_badly_does_not_end_all_reuse() -> None:
    cost = CostModel(CostSeeds(load_bytes_per_s=1e9, least_load_share=0.1))
    worker = PrefillWorker(NodeRef(NodeId("p"), 1), "near", load_bytes_per_s=10.0)
    assert cost.rates(worker) == Rates(1000.0, 1e8)
    prefix = tuple((copy_of(i),) for i in range(4))
    assert best_of(ask(300, prefix), cost.rates(worker)).blocks == 4


def test_a_full_decode_worker_makes_the_request_wait() -> None:
    cost = CostModel()
    roomy = decode(kv_tokens=100, kv_tokens_capacity=1000, running=2, step_ms=10)
    full = decode(kv_tokens=900, kv_tokens_capacity=1000, running=2, step_ms=10)
    asked = ask(150)
    assert cost.decode_cost(asked, roomy).wait_ms == 0
    assert cost.decode_cost(asked, full).wait_ms > 0


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.floats(0.1, 1000))
def test_more_in_the_batch_never_makes_steps_faster(
    running: int, ahead: int, step_ms: float
) -> None:
    cost = CostModel()
    alone = cost.decode_cost(ask(10), decode(running=running, step_ms=step_ms))
    more = cost.decode_cost(
        ask(10), decode(running=running, booked=ahead, step_ms=step_ms)
    )
    assert more.tbt_ms >= alone.tbt_ms >= step_ms * 0.999
