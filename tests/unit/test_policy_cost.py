"""What a placement is predicted to cost."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, Tier
from kvtide.policy import (
    Ask,
    Copy,
    CostModel,
    CostSeeds,
    DecodeWorker,
    LoadCurve,
    Plan,
    PrefillCurve,
    PrefillWorker,
    ReuseRule,
)
from kvtide.policy.cost import Load, Loader

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
    return Ask(tokens, new, BLOCK, BYTES, prefix=prefix)


def loader(
    tokens_per_s: float, bytes_per_s: float, host: str = "near", inflows: float = 0.0
) -> Loader:
    loading = LoadCurve.at(bytes_per_s, 0.25)
    return Loader(host, inflows, PrefillCurve.at(tokens_per_s), loading)


def best_of(asked: Ask, worker: Loader, cost: CostModel | None = None) -> Plan:
    """What a worker would load, each run from where it is cheaper."""
    cost = cost or CostModel()
    loads: list[Load] = []
    for run in cost.runs(asked):
        near_ms = cost.near_ms(asked, worker, run)
        far_ms = cost.far_ms(asked, worker, run, {})
        loads.append(Load(run, min(near_ms, far_ms), near=near_ms <= far_ms))
    return cost.plan(asked, worker, loads, ReuseRule.CHEAPEST)


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


def test_a_near_dram_copy_is_cheapest_then_far_then_ssd_then_a_hint() -> None:
    seeds = CostSeeds(remote_share=0.25, ssd_share=0.125, hint_share=0.5)
    cost, worker = CostModel(seeds), loader(1000, 1e9)

    def block_ms(host: str, tier: Tier, *, hint: bool = False) -> float:
        copy = replace(copy_of(0, host, tier), hint=hint)
        asked = ask(65, ((copy,),))
        (run,) = cost.runs(asked)
        near_ms = cost.near_ms(asked, worker, run)
        return min(near_ms, cost.far_ms(asked, worker, run, {}))

    assert block_ms("near", Tier.DRAM) == pytest.approx(1.2)
    assert block_ms("far", Tier.DRAM) == pytest.approx(4.2)
    assert block_ms("near", Tier.SSD) == pytest.approx(8.2)
    assert block_ms("far", Tier.SSD) == pytest.approx(32.2)
    assert block_ms("far", Tier.DRAM, hint=True) == pytest.approx(8.2)


def test_links_are_shared_and_several_sources_give_more_than_one() -> None:
    cost = CostModel(CostSeeds(block_overhead_ms=0.0))
    both = ask(65, ((copy_of(0, "a"), copy_of(0, "b")),))
    one = ask(65, ((copy_of(0, "a"),),))
    busy = {"a": 3.0, "b": 3.0}

    def far_ms(asked: Ask, inflows: float, outflows: dict[str, float]) -> float:
        (run,) = cost.runs(asked)
        return cost.far_ms(asked, loader(1000, 1e9, inflows=inflows), run, outflows)

    assert far_ms(one, 0, {}) == pytest.approx(4.0)
    assert far_ms(one, 0, busy) == pytest.approx(16.0)
    assert far_ms(both, 0, busy) == pytest.approx(8.0)
    # more sources don't make the own link faster
    assert far_ms(both, 0, {}) == pytest.approx(4.0)
    assert far_ms(both, 2, busy) == pytest.approx(12.0)


def test_computing_beats_a_slow_load() -> None:
    prefix = tuple((copy_of(i, "far"),) for i in range(4))
    plan = best_of(ask(300, prefix), loader(1e6, 1e7))
    assert (plan.blocks, plan.rest_tokens) == (0, 299)


def test_a_dear_block_in_front_of_cheap_ones_is_loaded_too() -> None:
    prefix = ((copy_of(0, "far", Tier.SSD),), *((copy_of(i),) for i in range(1, 4)))
    # near: 1 ms a block; far ssd: 16 ms; computing a block: 10 ms
    seeds = CostSeeds(block_overhead_ms=0.0)
    plan = best_of(ask(300, prefix), loader(6400, 1e9), CostModel(seeds))
    assert plan.blocks == 4
    assert plan.transfer_ms == pytest.approx(16 + 3)


def test_what_loading_hides_of_computing_shortens_both() -> None:
    prefix = tuple((copy_of(i),) for i in range(4))
    seeds = CostSeeds(block_overhead_ms=0.0, overlap_share=1.0)
    plan = best_of(ask(513, prefix), loader(6400, 1e9), CostModel(seeds))
    assert (plan.transfer_ms, plan.compute_ms) == pytest.approx((4.0, 40.0))
    assert plan.made_ms == pytest.approx(40.0)


copies = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["near", "far"]), st.sampled_from(list(Tier))),
        min_size=1,
        max_size=3,
    ),
    max_size=8,
)
curves = st.builds(
    PrefillCurve, st.floats(0, 5), st.floats(1e-3, 10), st.floats(0, 1e-3)
)


@settings(deadline=None)
@given(copies, st.integers(1, 700), curves, st.floats(1e5, 1e11))
def test_the_best_plan_is_the_cheapest_of_all_lengths(
    blocks: list[list[tuple[str, Tier]]], tokens: int, curve: PrefillCurve, rate: float
) -> None:
    """It ends where a run does, and no other length would be better."""
    prefix = tuple(
        tuple(copy_of(i, host, tier) for host, tier in block)
        for i, block in enumerate(blocks)
    )
    cost, asked = CostModel(), ask(tokens, prefix)
    worker = Loader("near", 0.0, curve, LoadCurve.at(rate, 0.25))
    best = best_of(asked, worker)
    loads = [
        min(cost.near_ms(asked, worker, run), cost.far_ms(asked, worker, run, {}))
        for run in cost.runs(asked)
        for _ in range(run.blocks)
    ]
    totals = [
        sum(loads[:length])
        + curve.ms(max(0, asked.kv_tokens - length * BLOCK), length * BLOCK)
        for length in range(asked.reusable_blocks + 1)
    ]
    # a fixed cost is saved only by what computes nothing at all
    slack = curve.fixed_ms if asked.kv_tokens % BLOCK == 0 else 0.0
    assert best.transfer_ms + best.compute_ms <= min(totals) + slack + 1e-6


def test_a_rate_that_was_measured_badly_does_not_end_all_reuse() -> None:
    cost = CostModel(CostSeeds(load_bytes_per_s=1e9, least_load_share=0.1))
    worker = PrefillWorker(NodeRef(NodeId("p"), 1), "near", load_bytes_per_s=10.0)
    found = cost.loader(worker)
    assert found.loading.near_byte_ms == pytest.approx(1e-5)
    prefix = tuple((copy_of(i),) for i in range(4))
    assert best_of(ask(300, prefix), found).blocks == 4


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
