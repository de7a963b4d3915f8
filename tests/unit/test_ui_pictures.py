"""The dashboard's pictures: requests, prefixes, nodes and figures over time."""

import msgspec
import pytest
from hypothesis import given, strategies as st
from tests.unit.gateway_story import (
    D1,
    GATEWAY,
    P1,
    P2,
    R,
    make_spec,
    placed,
    prefill_done,
)

from kvtide.bus import Changed, Gone, GoneReason, Joined, Member
from kvtide.bus.messages import (
    Beat,
    ChunkTime,
    DecodeTimes,
    NodeState,
    Outcome,
    PrefillLoad,
    PrefillTimes,
    RequestEnded,
    StoreLoad,
    Tokens,
)
from kvtide.gateway.life import AdmitAnswered, NodeGone, WorkerSaid
from kvtide.gateway.ui.chains import Chains
from kvtide.gateway.ui.journal import Journal
from kvtide.gateway.ui.picture import Picture
from kvtide.gateway.ui.request_view import MarkKind
from kvtide.gateway.ui.series import Series
from kvtide.kv import (
    BlockKey,
    Located,
    NodeId,
    NodeRef,
    RequestId,
    Role,
    SlotRef,
    TenantId,
    Tier,
)

TENANT = TenantId("t")


def ended(request: RequestId = R, *, ttft_ms: float | None = 40.0) -> RequestEnded:
    return RequestEnded(
        request=request,
        attempt=1,
        gateway=GATEWAY,
        tenant=TENANT,
        model="m",
        outcome=Outcome.FINISHED,
        code="stop",
        prompt_tokens=40,
        cached_tokens=16,
        output_tokens=3,
        ttft_ms=ttft_ms,
        total_ms=90.0,
        tbt_ms=20.0,
    )


def copy(node: str, tier: Tier = Tier.DRAM) -> Located:
    slot = SlotRef(NodeId(node), 1, tier, 0, 0, 64, 1)
    return Located(key=BlockKey(bytes(16)), slot=slot, header_xxh3=0)


def journal_of(prompt_tokens: int) -> Journal:
    journal = Journal()
    spec = make_spec(prompt=tuple(range(prompt_tokens)))
    journal.arrived(spec, 16, now_s=100.0, wall_s=1000.0)
    return journal


def test_a_request_is_told_from_its_arrival_to_its_end() -> None:
    journal = journal_of(70)
    reuse = (copy("s1"), copy("s1"), copy("s2"), copy("s1", Tier.SSD))
    answer = placed(1, P1, D1)
    hosts = {"p1": "h1", "s1": "h1", "s2": "h2"}

    def host_of(node: NodeId) -> str:
        return hosts.get(node, "")

    from_pool = msgspec.structs.replace(answer, reuse=reuse)
    journal.told(R, AdmitAnswered(from_pool), 100.002, host_of)
    journal.told(R, WorkerSaid(P1, prefill_done(reused=64)), 100.03, host_of)
    first = Tokens(
        request=R, attempt=1, decode=D1, choice=0, index=0, ids=(5, 6),
        times=DecodeTimes(wait_ms=1, pull_ms=4, first_step_ms=3),
    )  # fmt: skip
    journal.told(R, WorkerSaid(D1, first), 100.04, host_of)
    assert journal.ended(ended(), 100.09, 1000.09)
    assert not journal.ended(ended(), 100.2, 1000.2)  # an echo

    detail = journal.detail(R)
    assert detail is not None
    kinds = [mark.kind for mark in detail.marks]
    assert kinds == [
        MarkKind.ARRIVED,
        MarkKind.PLACED,
        MarkKind.PREFILLED,
        MarkKind.FIRST_TOKEN,
        MarkKind.ENDED,
    ]
    assert [(o.start, o.end, o.source) for o in detail.origins] == [
        (0, 32, "host"),
        (32, 48, "remote"),
        (48, 64, "ssd"),
        (64, 70, "computed"),
    ]
    assert {"placement", "hand-over", "first step", "tokens"} <= {
        span.name for span in detail.spans
    }
    assert all(0 <= span.start_ms < span.end_ms for span in detail.spans)
    assert (detail.view.state, detail.view.ttft_ms) == ("finished", 40.0)
    assert len(detail.token_ms) == 2


def test_each_chunk_of_a_prefill_is_a_span() -> None:
    journal = journal_of(70)
    journal.told(R, AdmitAnswered(placed(1, P1, D1)), 100.01, lambda _: "")
    chunks = tuple(
        ChunkTime(tokens=size, end_ms=end, took_ms=9.0)
        for size, end in ((32, 15.0), (32, 30.0), (5, 41.0))
    )
    times = PrefillTimes(queue_ms=4.0, load_ms=2.0, compute_ms=27.0, chunks=chunks)
    done = msgspec.structs.replace(prefill_done(reused=0), times=times)
    journal.told(R, WorkerSaid(P1, done), 100.05, lambda _: "")
    detail = journal.detail(R)
    assert detail is not None
    shown = {span.name: (span.start_ms, span.end_ms) for span in detail.spans}
    assert shown["queue"] == pytest.approx((10.0, 14.0))
    assert shown["chunk 2: 32 tokens"] == pytest.approx((31.0, 40.0))
    assert shown["chunk 3: 5 tokens"][1] == pytest.approx(50.0)  # never after its end


def test_a_fail_over_is_a_span_and_a_mark_of_its_own() -> None:
    journal = journal_of(8)
    journal.told(R, AdmitAnswered(placed(1, P1, D1)), 100.01, lambda _: "")
    journal.told(R, NodeGone(NodeRef(NodeId("elsewhere"), 1)), 100.2, lambda _: "")
    journal.told(R, NodeGone(P1), 100.5, lambda _: "")
    journal.told(R, AdmitAnswered(placed(2, P2, D1)), 100.6, lambda _: "")
    detail = journal.detail(R)
    assert detail is not None
    lost = [mark.node for mark in detail.marks if mark.kind is MarkKind.LOST]
    assert lost == ["p1"]
    (again,) = [span for span in detail.spans if span.name == "fail-over"]
    assert again.attempt == 2
    assert again.start_ms < again.end_ms
    assert (detail.view.prefill, detail.view.attempt) == ("p2", 2)


def test_only_the_newest_requests_are_kept_and_they_can_be_searched() -> None:
    journal = Journal(kept=3)
    for number in range(5):
        record = ended(RequestId(f"r{number}"))
        journal.ended(record, 100.0 + number, 1000.0 + number)
    assert [view.request for view in journal.recent()] == ["r4", "r3", "r2"]
    assert [view.request for view in journal.recent(text="r3")] == ["r3"]
    assert journal.recent(state="failed") == []
    assert journal.detail("r0") is None


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(number.to_bytes(16)) for number in numbers)


def test_prefixes_that_part_are_a_tree() -> None:
    chains = Chains()
    chains.reused(TENANT, keys(1, 2, 3, 4), 0.0)
    chains.reused(TENANT, keys(1, 2, 5), 0.0)
    chains.reused(TENANT, keys(9), 0.0)
    found = chains.hottest(0.0, 10)
    first = found[0]
    assert (first.parent, first.depth_blocks, first.blocks, first.heat) == (
        -1,
        0,
        2,
        2,
    )
    below = [c for c in found if c.parent == 0]
    assert sorted((c.depth_blocks, c.blocks) for c in below) == [(2, 1), (2, 2)]
    assert len(found) == 4
    assert chains.hottest(600.0, 1)[0].heat == 1.0  # halved


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), max_size=60),
    st.integers(1, 12),
)
def test_the_tree_stays_small_and_parents_come_first(
    uses: list[list[int]], kept: int
) -> None:
    chains = Chains(kept=kept)
    for step, path in enumerate(uses):
        chains.reused(TENANT, keys(*path), float(step))
        assert len(chains) <= kept + 6
    found = chains.hottest(float(len(uses)), 1000)
    assert all(chain.parent < index for index, chain in enumerate(found))
    assert sum(chain.blocks for chain in found) == len(chains)


def member(name: str, state: NodeState = NodeState.READY, queued: int = 0) -> Member:
    beat = Beat(
        node=NodeRef(NodeId(name), 1),
        roles=(Role.PREFILL,),
        seq=1,
        host="h",
        state=state,
        steps=0,
        load=(PrefillLoad(queued=queued, busy_share=0.5),),
    )
    return Member(beat, 0.0, 0.0)


def test_a_page_gets_only_what_is_new_to_it() -> None:
    picture = Picture()
    picture.heard(Joined(member("a")), 1.0)
    picture.heard(Joined(member("b", NodeState.LOADING)), 1.0)
    first = picture.since(0)
    assert first.full
    assert {node.node for node in first.nodes} == {"a", "b"}
    picture.heard(Changed(member("a"), member("a", queued=3)), 2.0)
    second = picture.since(first.version)
    assert not second.full
    assert [(node.node, node.queued, node.busy) for node in second.nodes] == [
        ("a", 3, 0.5)
    ]
    assert second.happenings == []
    picture.heard(Changed(member("b", NodeState.LOADING), member("b")), 3.0)
    picture.heard(Gone(member("a"), GoneReason.SILENT), 4.0)
    third = picture.since(second.version)
    assert third.gone == ["a"]
    assert [each.kind for each in third.happenings] == ["ready", "silent"]
    assert picture.since(third.version).nodes == []
    assert picture.since(10**9).full  # of another life of the gateway


def test_a_disk_that_fails_is_told_at_once() -> None:
    def store(state: str, reason: str = "") -> Member:
        load = (StoreLoad(ssd_state=state, ssd_reason=reason),)
        beat = msgspec.structs.replace(member("s").beat, roles=(Role.STORE,), load=load)
        return Member(beat, 0.0, 0.0)

    picture = Picture()
    picture.heard(Joined(store("ready")), 1.0)
    version = picture.version
    picture.heard(Changed(store("ready"), store("out", "no space left")), 2.0)
    picture.heard(Changed(store("out", "no space left"), store("ready")), 3.0)
    told = picture.since(version).happenings
    assert [(each.kind, each.text) for each in told] == [
        ("ssd_fault", "SSD is out: no space left"),
        ("ssd", "SSD is ready"),
    ]


def test_goodput_counts_what_met_its_targets() -> None:
    series = Series(kept=2)
    for target in (None, 50.0, 30.0):
        series.ended(
            ended(), predicted_ttft_ms=60.0, ttft_target_ms=target, tbt_target_ms=None
        )
    point = series.close_step(10.0, open_requests=4)
    assert (point.finished, point.good, point.late) == (3, 2, 1)
    assert (point.ttft_ms, point.ttft_error, point.open_requests) == (40.0, 0.5, 4)
    empty = series.close_step(11.0, 0)
    assert (empty.finished, empty.ttft_ms) == (0, None)
    series.close_step(12.0, 0)
    assert [point.at_s for point in series.since(10.5)] == [11.0, 12.0]
