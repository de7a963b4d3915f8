"""Blocks that are being computed count for a request that goes to the same worker."""

from hypothesis import given, settings, strategies as st
from tests.unit.conductor_cluster import (
    BLOCK,
    beat,
    ended,
    key,
    keys,
    ref,
)
from tests.unit.test_conductor_dispatcher import World, fill, world

from kvtide.bus.messages import PrefillLoad
from kvtide.conductor.events import EndHeard, MemberGone, MemberSeen
from kvtide.conductor.reducers.pending import Pending, PendingBlocks
from kvtide.kv import NodeId, RequestId, Role

P1, P2 = NodeId("p1"), NodeId("p2")


def name(number: int) -> RequestId:
    return RequestId(f"r{number}")


def busy(made: World, prefill: str, queue_ms: float, host: str = "h1") -> None:
    load = PrefillLoad(queue_ms=queue_ms)
    made.handle(MemberSeen(beat(prefill, Role.PREFILL, host=host, load=load)))


def test_a_repeat_of_a_prompt_that_is_being_computed_goes_there_and_is_cheap() -> None:
    made = world()
    first = made.placed(request="r1", tokens=3000)
    assert first.prefill == ref("p1")
    busy(made, "p2", 1000, "h2")
    again = made.placed(request="r2", tokens=3000)
    assert again.prefill == ref("p1")
    assert again.reuse == ()
    assert again.chosen.hit_tokens == 2999 // BLOCK * BLOCK
    assert again.chosen.prefill_ms < first.chosen.prefill_ms / 10
    assert again.chosen.queue_ms >= first.chosen.prefill_ms
    assert "once another request has computed them there" in again.reason


def test_a_repeat_does_not_wait_for_a_worker_that_is_busy_for_long() -> None:
    made = world()
    first = made.placed(request="r1", tokens=1000)
    assert first.prefill is not None
    other = "p2" if first.prefill.node == "p1" else "p1"
    host = {"p1": "h1", "p2": "h2"}[first.prefill.node]
    busy(made, first.prefill.node, 60_000, host)
    again = made.placed(request="r2", tokens=1000)
    assert again.prefill == ref(other)
    assert again.chosen.hit_tokens == 0


def test_blocks_of_the_pool_and_pending_ones_add_up() -> None:
    made = world()
    fill(made, ref("s1"), keys(4))
    first = made.placed(request="r1", tokens=1000)
    busy(made, "p2", 1000, "h2")
    again = made.placed(request="r2", tokens=1000)
    assert again.prefill == first.prefill == ref("p1")
    assert [copy.key for copy in again.reuse] == list(keys(4))
    assert again.chosen.hit_tokens == 999 // BLOCK * BLOCK


def test_what_has_ended_or_whose_worker_is_gone_is_pending_no_more() -> None:
    made = world(
        beat("p1", Role.PREFILL), beat("d1", Role.DECODE), beat("s1", Role.STORE)
    )
    made.placed(request="r1", tokens=1000)
    made.handle(EndHeard(ended("r1")))
    assert made.placed(request="r2", tokens=1000).chosen.hit_tokens == 0
    made.handle(MemberGone(ref("p1")))
    made.handle(MemberSeen(beat("p1", Role.PREFILL, epoch=2)))
    assert made.placed(request="r3", tokens=1000).chosen.hit_tokens == 0
    assert made.placed(request="r4", tokens=1000).chosen.hit_tokens > 0


def test_a_chain_that_two_requests_make_is_followed_through_both() -> None:
    pending = PendingBlocks(100)
    pending.add(name(1), P1, keys(3), 0.0, 2.0)
    pending.add(name(2), P1, keys(5), 0.0, 3.0)
    pending.add(name(3), P2, keys(2), 0.0, 1.0)
    found = pending.after(keys(9), 0, 0.5)
    assert found == {P1: Pending(5, 2500.0), P2: Pending(2, 500.0)}
    assert pending.after(keys(9), 3, 0.5) == {P1: Pending(2, 2500.0)}
    assert pending.after(keys(9), 5, 0.5) == {}
    assert pending.after(keys(9), 9, 0.5) == {}


def test_what_never_comes_is_forgotten() -> None:
    pending = PendingBlocks(100)
    pending.add(name(1), P1, keys(3), 0.0, 2.0)
    assert pending.after(keys(3), 0, 5.9) == {P1: Pending(3, 0.0)}
    assert pending.after(keys(3), 0, 6.1) == {}
    assert len(pending) == 0


chains = st.tuples(st.integers(0, 4), st.integers(0, 6))
acts = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), st.sampled_from([P1, P2]), chains),
    st.tuples(st.just("end"), st.integers(0, 5), st.just(P1), st.just((0, 0))),
    st.tuples(st.just("gone"), st.just(0), st.sampled_from([P1, P2]), chains),
    st.tuples(st.just("tick"), st.integers(0, 9), st.just(P1), st.just((0, 0))),
)


@settings(deadline=None)
@given(st.lists(acts, max_size=40))
def test_counts_are_kept_whatever_comes(
    steps: list[tuple[str, int, NodeId, tuple[int, int]]],
) -> None:
    pending, now_s, limit = PendingBlocks(8), 0.0, 8
    for act, number, node, (start, count) in steps:
        now_s += 0.25
        if act == "add":
            chain = keys(count, start=start)
            pending.add(name(number), node, chain, now_s, now_s + count)
        elif act == "end":
            pending.remove(name(number))
        elif act == "gone":
            pending.worker_gone(node)
            assert node not in pending.after(keys(12), start, now_s)
        else:
            now_s += number
            pending.tick(now_s)
        held = sum(
            len(pending.after([key(each)], 0, now_s)) for each in range(limit + 4)
        )
        assert held == len(pending) <= limit
    pending.tick(now_s + 1000)
    assert len(pending) == 0
