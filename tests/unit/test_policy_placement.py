"""Where requests go: tables for what people expect, properties for the rest."""

from dataclasses import replace

import pytest
from tests.unit.policy_both import BothWays

from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, Tier
from kvtide.policy import (
    Ask,
    Cluster,
    Copy,
    DecodeWorker,
    Placement,
    PlacementPolicy,
    PolicyName,
    PrefillWorker,
    Refusal,
    RefusalCode,
    Targets,
    rules_of,
)

BLOCK = 64
BYTES = 1_000_000


def ref(name: str) -> NodeRef:
    return NodeRef(NodeId(name), 1)


def copy_at(number: int, host: str) -> Copy:
    slot = SlotRef(NodeId(f"store-{host}"), 1, Tier.DRAM, 0, 0, BYTES, number)
    return Copy(Located(BlockKey(number.to_bytes(16, "big")), slot, number), host)


def prefix_at(*hosts: str) -> tuple[tuple[Copy, ...], ...]:
    """One copy of each block, at these hosts in order."""
    return tuple((copy_at(i, host),) for i, host in enumerate(hosts))


def prefill(name: str, host: str = "", **fields: float) -> PrefillWorker:
    return PrefillWorker(ref(name), host or f"host-{name}", **fields)  # pyright: ignore[reportArgumentType]


def decode(name: str, **fields: float) -> DecodeWorker:
    return DecodeWorker(ref(name), f"host-{name}", **fields)  # pyright: ignore[reportArgumentType]


def best(*, direct_blocks: int = 1, targets: Targets | None = None) -> BothWays:
    return BothWays(
        rules_of(PolicyName.BEST, direct_blocks=direct_blocks), targets=targets
    )


def algorithm1(balancing_ratio: float = 2.0) -> BothWays:
    rules = rules_of(PolicyName.ALGORITHM1, balancing_ratio=balancing_ratio)
    return BothWays(rules)


ASK = Ask(1000, 100, BLOCK, BYTES)
TWO = (prefill("p1"), prefill("p2"))
ONE_DECODE = (decode("d1", kv_tokens_capacity=100_000, step_ms=10),)


def placed(policy: PlacementPolicy, ask: Ask, cluster: Cluster) -> Placement:
    verdict = policy.place(ask, cluster)
    assert isinstance(verdict, Placement), verdict
    return verdict


def refused(policy: PlacementPolicy, ask: Ask, cluster: Cluster) -> Refusal:
    verdict = policy.place(ask, cluster)
    assert isinstance(verdict, Refusal), verdict
    return verdict


@pytest.mark.parametrize(
    ("prefills", "prefix", "winner"),
    [
        pytest.param(TWO, (), "p1", id="equal: the first"),
        pytest.param(
            (prefill("p1", waiting_tokens=500), prefill("p2")), (), "p2", id="queue"
        ),
        pytest.param(TWO, prefix_at(*["host-p2"] * 10), "p2", id="nearer copies"),
        pytest.param(
            (prefill("p1"), prefill("p2", waiting_tokens=2000)),
            prefix_at(*["host-p2"] * 10),
            "p1",
            id="a long queue beats near copies",
        ),
        pytest.param(
            (prefill("p1", tokens_per_s=500), prefill("p2", tokens_per_s=2000)),
            (),
            "p2",
            id="faster",
        ),
    ],
)
def test_the_smallest_time_to_first_token_wins(
    prefills: tuple[PrefillWorker, ...],
    prefix: tuple[tuple[Copy, ...], ...],
    winner: str,
) -> None:
    cluster = Cluster(prefills, ONE_DECODE)
    placement = placed(best(), replace(ASK, prefix=prefix), cluster)
    assert placement.chosen.estimate.prefill == winner
    assert placement.considered == 2
    ttfts = [estimate.ttft_ms for estimate in placement.candidates]
    assert ttfts == sorted(ttfts)
    assert placement.candidates[0] == placement.chosen.estimate
    assert winner in placement.reason


@pytest.mark.parametrize(
    ("tokens", "hits", "direct"),
    [
        pytest.param(1, 0, True, id="one token"),
        pytest.param(64, 0, True, id="shorter than a block"),
        pytest.param(65, 0, True, id="one block to compute"),
        pytest.param(66, 0, False, id="more than a block to compute"),
        pytest.param(1000, 15, True, id="all full blocks in the pool"),
        pytest.param(1000, 14, False, id="one full block missing"),
        pytest.param(960, 14, True, id="exact blocks: the last one is decode's"),
    ],
)
def test_decode_computes_a_rest_of_at_most_one_block_itself(
    tokens: int, hits: int, direct: bool
) -> None:
    ask = replace(ASK, prompt_tokens=tokens, prefix=prefix_at(*["host-d1"] * hits))
    chosen = placed(best(), ask, Cluster(TWO, ONE_DECODE)).chosen
    assert (chosen.prefill is None) == direct
    assert len(chosen.reuse) == hits
    assert chosen.rest_tokens == tokens - 1 - hits * BLOCK


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (replace(ASK, prompt_tokens=1), "d1 needs no prefill, 0 of 1 prompt tokens"),
        (replace(ASK, prompt_tokens=9), "d1 computes the last 8 tokens itself"),
        (ASK, "p1 computes 999 tokens for d1, 0 of 1000 prompt tokens from the pool"),
        (ASK, "p2 would take 100 ms longer, mostly its queue"),
        (
            replace(ASK, prefix=prefix_at(*["host-p1"] * 9)),
            "longer, mostly loading",
        ),
        (
            replace(ASK, prompt_tokens=9),
            "p1 would take 8 ms longer, mostly the hand-over",
        ),
    ],
)
def test_the_reason_is_a_sentence_with_the_numbers(ask: Ask, says: str) -> None:
    cluster = Cluster((prefill("p1"), prefill("p2", waiting_tokens=100)), ONE_DECODE)
    if "loading" in says:
        cluster = Cluster(TWO, ONE_DECODE)
    assert says in placed(best(), ask, cluster).reason


def test_a_direct_placement_needs_no_prefill_worker() -> None:
    ask = replace(ASK, prompt_tokens=40)
    assert placed(best(), ask, Cluster((), ONE_DECODE)).chosen.prefill is None


def test_decode_computes_no_rest_where_many_others_wait_for_theirs() -> None:
    ask = replace(ASK, prompt_tokens=40)
    busy = decode("d1", kv_tokens_capacity=10_000, step_ms=50, fill_tokens=640)
    chosen = placed(best(), ask, Cluster(TWO, (busy,))).chosen
    assert chosen.prefill == ref("p1")
    alone = placed(best(), ask, Cluster((), (busy,))).chosen.estimate
    assert alone.queue_ms == pytest.approx(10 * alone.tbt_ms)
    cached = replace(ASK, prompt_tokens=1)
    nothing_left = placed(best(), cached, Cluster((), (busy,))).chosen
    assert nothing_left.estimate.queue_ms == 0


def test_direct_placements_can_be_switched_off() -> None:
    ask = replace(ASK, prompt_tokens=40)
    policy = best(direct_blocks=0)
    assert placed(policy, ask, Cluster(TWO, ONE_DECODE)).chosen.prefill == ref("p1")


@pytest.mark.parametrize(
    ("one", "other", "winner"),
    [
        pytest.param({}, {}, "d1", id="equal: the first"),
        pytest.param({"running": 4, "step_ms": 40}, {"step_ms": 30}, "d2", id="pace"),
        pytest.param({"booked": 1}, {}, "d2", id="booked"),
        pytest.param({"kv_tokens": 9000}, {"kv_tokens": 100}, "d2", id="memory"),
        pytest.param(
            {"kv_tokens": 9_999, "step_ms": 5},
            {"step_ms": 50, "running": 3},
            "d2",
            id="full: better slow than waiting",
        ),
        pytest.param(
            {"kv_tokens_capacity": 200}, {"step_ms": 900}, "d2", id="never fits"
        ),
    ],
)
def test_the_least_loaded_decode_worker_is_taken(
    one: dict[str, float], other: dict[str, float], winner: str
) -> None:
    base = {"kv_tokens_capacity": 10_000}
    decodes = (decode("d1", **{**base, **one}), decode("d2", **{**base, **other}))
    placement = placed(best(), ASK, Cluster(TWO, decodes))
    assert placement.chosen.decode == ref(winner)


def test_no_workers() -> None:
    for cluster in (Cluster((), ()), Cluster(TWO, ()), Cluster((), ONE_DECODE)):
        refusal = refused(best(), ASK, cluster)
        assert refusal.code is RefusalCode.NO_WORKERS
        assert refusal.retry_after_ms


def test_what_no_decode_worker_can_ever_hold_is_too_large() -> None:
    decodes = (
        decode("d1", kv_tokens_capacity=1099),
        decode("d2", kv_tokens_capacity=7),
    )
    refusal = refused(best(), ASK, Cluster(TWO, decodes))
    assert (refusal.code, refusal.retry_after_ms) == (RefusalCode.TOO_LARGE, None)
    assert "1100" in refusal.reason
    assert "1099" in refusal.reason
    assert placed(best(), ASK, Cluster(TWO, (decode("d1", kv_tokens_capacity=1100),)))


def test_a_queue_beyond_the_limit_is_overload_until_it_has_shrunk() -> None:
    policy = best(targets=Targets(queue_ms=2000))
    full = (prefill("p1", waiting_tokens=5000), prefill("p2", waiting_tokens=3500))
    refusal = refused(policy, ASK, Cluster(full, ONE_DECODE))
    assert refusal.code is RefusalCode.OVERLOADED
    assert refusal.retry_after_ms == pytest.approx(1500)
    assert [estimate.prefill for estimate in refusal.candidates] == ["p2", "p1"]
    later = (full[0], prefill("p2", waiting_tokens=2000))
    assert placed(policy, ASK, Cluster(later, ONE_DECODE))


def test_a_target_of_the_request_itself() -> None:
    cluster = Cluster((prefill("p1", waiting_tokens=1000),), ONE_DECODE)
    estimate = placed(best(), ASK, cluster).chosen.estimate
    exact = replace(ASK, ttft_ms=estimate.ttft_ms, tbt_ms=estimate.tbt_ms)
    assert placed(best(), exact, cluster)
    late = refused(best(), replace(exact, ttft_ms=estimate.ttft_ms - 300), cluster)
    assert (late.code, late.retry_after_ms) == (
        RefusalCode.OVERLOADED,
        pytest.approx(300),
    )
    never = refused(best(), replace(exact, ttft_ms=5), cluster)
    assert (never.code, never.retry_after_ms) == (RefusalCode.OVERLOADED, None)
    slow = refused(best(), replace(exact, tbt_ms=1), cluster)
    assert slow.code is RefusalCode.OVERLOADED


def test_the_paper_uses_its_own_prefix_unless_the_best_is_much_longer() -> None:
    prefix = (
        *((copy_at(i, "host-p1"), copy_at(i, "host-p2")) for i in range(6)),
        *((copy_at(i, "host-p2"),) for i in range(6, 10)),
    )
    ask = replace(ASK, prefix=prefix)
    cluster = Cluster((prefill("p1"),), ONE_DECODE)
    own = placed(algorithm1(2), ask, cluster).chosen
    assert len(own.reuse) == 6
    fetched = placed(algorithm1(1.5), ask, cluster).chosen
    assert len(fetched.reuse) == 10
    elsewhere = Cluster((prefill("p3"),), ONE_DECODE)
    infinite = placed(algorithm1(1e9), ask, elsewhere).chosen
    assert len(infinite.reuse) == 10
