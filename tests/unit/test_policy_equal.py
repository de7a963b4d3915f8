"""Columns decide what the readable policy decides, and any placement is sound."""

import pytest
from hypothesis import given, settings, strategies as st
from tests.unit.policy_both import BothWays
from tests.unit.test_policy_placement import BYTES, ref

from kvtide.kv import BlockKey, Located, NodeId, SlotRef, Tier
from kvtide.policy import (
    Ask,
    Cluster,
    Copy,
    CostSeeds,
    DecodeWorker,
    Lateness,
    LoadCurve,
    Placement,
    PolicyName,
    PolicyRules,
    PrefillCurve,
    PrefillWorker,
    Refusal,
    StepCurve,
    Targets,
    rules_of,
)

pytestmark = pytest.mark.timeout(120)

HOSTS = ["", "a", "b", "c"]
nodes = st.integers(0, 5).map(lambda i: ref(f"n{i}"))
hosts = st.sampled_from(HOSTS)
prefill_curves = st.builds(
    PrefillCurve, st.floats(0, 50), st.floats(1e-3, 10), st.floats(0, 1e-3)
)
load_curves = st.builds(
    LoadCurve, st.floats(0, 20), st.floats(1e-9, 1e-4), st.floats(1e-9, 1e-3)
)
step_curves = st.builds(
    StepCurve, st.floats(0.1, 50), st.floats(0, 5), st.floats(0, 1e-2)
)
workers = st.builds(
    PrefillWorker,
    ref=nodes,
    host=hosts,
    waiting_tokens=st.integers(0, 100_000),
    tokens_per_s=st.just(0.0) | st.floats(1, 1e6),
    load_bytes_per_s=st.just(0.0) | st.floats(1e3, 1e12),
    waiting_ms=st.just(0.0) | st.floats(0, 1e4),
    inflows=st.sampled_from([0.0, 1.0, 3.0]),
    pending_blocks=st.sampled_from([0, 0, 1, 9, 200]),
    pending_ms=st.just(0.0) | st.floats(0, 1e4),
    curve=st.none() | prefill_curves,
    loading=st.none() | load_curves,
)
decoders = st.builds(
    DecodeWorker,
    ref=nodes,
    host=hosts,
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    booked=st.integers(0, 64),
    kv_tokens=st.integers(0, 100_000),
    kv_tokens_capacity=st.just(0) | st.integers(1, 100_000),
    step_ms=st.just(0.0) | st.floats(0.1, 1e4),
    coming=st.floats(-70, 20),
    coming_kv_tokens=st.floats(-2e5, 1e4),
    fill_tokens=st.sampled_from([0, 64, 1000]),
    curve=st.none() | step_curves,
)


@st.composite
def copies(draw: st.DrawFn, block: int) -> tuple[Copy, ...]:
    found: list[Copy] = []
    for host in draw(st.lists(hosts, min_size=1, max_size=3)):
        tier, hint = draw(st.sampled_from(list(Tier))), draw(st.booleans())
        use = len(found)
        slot = SlotRef(NodeId(f"store-{host}"), 1, tier, 0, use, BYTES, block)
        key = BlockKey(block.to_bytes(16, "big"))
        found.append(Copy(Located(key, slot, block), host, hint))
    return tuple(found)


@st.composite
def prefixes(draw: st.DrawFn) -> tuple[tuple[Copy, ...], ...]:
    """Blocks of which neighbours are often held alike."""
    blocks: list[tuple[Copy, ...]] = []
    for number in range(draw(st.integers(0, 8))):
        if blocks and draw(st.booleans()):
            blocks.append(blocks[-1])
        else:
            blocks.append(draw(copies(number)))
    return tuple(blocks)


asks = st.builds(
    Ask,
    prompt_tokens=st.integers(0, 5000),
    max_new_tokens=st.integers(0, 5000),
    block_tokens=st.sampled_from([16, 64, 512]),
    block_bytes=st.integers(1, 10**9),
    prefix=prefixes(),
    ttft_ms=st.none() | st.floats(0, 1e6),
    tbt_ms=st.none() | st.floats(0, 1e5),
    priority=st.integers(-1, 1),
    turn=st.integers(0, 100),
    answer_tokens=st.sampled_from([0.0, 1.0, 333.3]),
    lateness=st.none()
    | st.builds(Lateness, st.floats(0, 500), st.floats(0.25, 4), st.floats(0.25, 4)),
    one_node=st.booleans(),
)
rules = st.builds(
    rules_of,
    st.sampled_from(list(PolicyName)),
    balancing_ratio=st.sampled_from([1.0, 2.0, 1e9]),
    direct_blocks=st.integers(0, 2),
)
seeds = st.builds(CostSeeds, overlap_share=st.sampled_from([0.0, 0.5, 1.0]))
clusters = st.builds(
    Cluster,
    st.lists(workers, max_size=12, unique_by=lambda w: w.ref).map(tuple),
    st.lists(decoders, max_size=6, unique_by=lambda w: w.ref).map(tuple),
    st.dictionaries(hosts, st.sampled_from([0.0, 1.0, 5.0]), max_size=4),
)


@settings(deadline=None, max_examples=300)
@given(rules, seeds, asks, clusters)
def test_columns_decide_the_same(
    chosen_rules: PolicyRules, some_seeds: CostSeeds, ask: Ask, cluster: Cluster
) -> None:
    policy = BothWays(chosen_rules, some_seeds, Targets(queue_ms=1e6))
    verdict = policy.place(ask, cluster)
    if isinstance(verdict, Refusal):
        assert verdict.reason
        assert verdict.retry_after_ms is None or verdict.retry_after_ms >= 100
    else:
        is_sound(ask, cluster, verdict)


def is_sound(ask: Ask, cluster: Cluster, verdict: Placement) -> None:
    chosen, estimate = verdict.chosen, verdict.chosen.estimate
    assert chosen.decode in {worker.ref for worker in cluster.decodes}
    assert chosen.prefill is None or chosen.prefill in {w.ref for w in cluster.prefills}
    if ask.one_node:
        (worker,) = (w for w in cluster.prefills if w.ref == chosen.prefill)
        assert chosen.decode == worker.ref
        assert {
            c.host for copies in ask.prefix for c in copies if c.located in chosen.reuse
        } <= {worker.host}
    for number, located in enumerate(chosen.reuse):
        assert located in {copy.located for copy in ask.prefix[number]}
    pending_tokens = estimate.hit_tokens - len(chosen.reuse) * ask.block_tokens
    if pending_tokens:
        (worker,) = (w for w in cluster.prefills if w.ref == chosen.prefill)
        assert 0 < pending_tokens <= worker.pending_blocks * ask.block_tokens
        assert len(chosen.reuse) == ask.reusable_blocks
    assert estimate.hit_tokens + chosen.rest_tokens == ask.kv_tokens
    assert 1 <= len(verdict.candidates) <= 8
    for shown in verdict.candidates:
        parts = (shown.queue_ms, shown.transfer_ms, shown.prefill_ms, shown.wait_ms)
        assert min(parts) >= 0
        assert shown.ttft_ms > 0
