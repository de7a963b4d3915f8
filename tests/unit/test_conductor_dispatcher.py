"""The dispatcher: one answer to each question, sound whatever happens."""

from dataclasses import dataclass, field

import msgspec
import pytest
from tests.unit.conductor_cluster import (
    BLOCK,
    FACTS,
    admit,
    beat,
    ended,
    keys,
    located,
    ref,
)

from kvtide.bus import Changed, Gone, GoneReason, Joined, Member, Restarted
from kvtide.bus.messages import (
    Beat,
    DecodeLoad,
    Explained,
    ExplainQuery,
    Failure,
    GatewayLoad,
    NodeState,
    Placed,
    PrefillLoad,
    RejectCode,
    Rejected,
    StatusReply,
)
from kvtide.conductor.commands import (
    Announce,
    Command,
    RecordDecision,
    RecordEnd,
    RecordNode,
    RecordNodeGone,
    Reply,
)
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import (
    AdmitAsked,
    BlocksMoved,
    EndHeard,
    Event,
    ExplainAsked,
    Fenced,
    MemberGone,
    MemberSeen,
    PlacementHeard,
    ReplyTo,
    StatusAsked,
    StoreExact,
    StoreForgotten,
    Tick,
    member_events,
)
from kvtide.kv import BlockKey, NodeId, NodeRef, RequestId, Role


@dataclass
class World:
    """A dispatcher, its time, and everything that it answered."""

    dispatcher: Dispatcher = field(default_factory=lambda: Dispatcher(ref("c1")))
    now_s: float = 1000.0
    asked: int = 0

    def handle(self, event: Event) -> list[Command]:
        return self.dispatcher.handle(event, self.now_s)

    def ask(self, question: object) -> tuple[Placed | Rejected, list[Command]]:
        assert isinstance(question, type(admit()))
        self.asked += 1
        commands = self.handle(AdmitAsked(question, ReplyTo(self.asked)))
        replies = [command for command in commands if isinstance(command, Reply)]
        (reply,) = replies
        assert reply.reply_to == self.asked
        assert isinstance(reply.message, Placed | Rejected)
        assert reply.message.request == question.request
        assert reply.message.attempt == question.attempt
        return reply.message, [command for command in commands if command != reply]

    def placed(self, **fields: object) -> Placed:
        answer, _ = self.ask(admit(**fields))  # pyright: ignore[reportArgumentType]
        assert isinstance(answer, Placed), answer
        return answer

    def rejected(self, **fields: object) -> Rejected:
        answer, _ = self.ask(admit(**fields))  # pyright: ignore[reportArgumentType]
        assert isinstance(answer, Rejected), answer
        return answer


def world(*beats: Beat, me: str = "c1") -> World:
    made = World(Dispatcher(ref(me)))
    default = (
        beat("p1", Role.PREFILL),
        beat("p2", Role.PREFILL, host="h2"),
        beat("d1", Role.DECODE),
        beat("d2", Role.DECODE, host="h2"),
        beat("s1", Role.STORE),
        beat("s2", Role.STORE, host="h2"),
        beat("g1", Role.GATEWAY),
    )
    for each in beats or default:
        made.handle(MemberSeen(each))
    return made


def fill(made: World, store: NodeRef, blocks: tuple[BlockKey, ...]) -> None:
    copies = [located(block, store) for block in blocks]
    made.handle(BlocksMoved(store, copies, []))


def test_a_placement_heard_after_its_gateways_life_is_let_go_of() -> None:
    here, there = world(), world(me="c2")
    _, commands = there.ask(admit(gateway=ref("g1")))
    (made,) = [each.made for each in commands if isinstance(each, Announce)]
    for gone in (MemberSeen(beat("g1", Role.GATEWAY, epoch=2)), MemberGone(ref("g1"))):
        here.handle(gone)
        here.handle(PlacementHeard(made))
        assert len(here.dispatcher.bookings) == 1
        here.now_s += 1.0
        here.handle(Tick())
        assert len(here.dispatcher.bookings) == 1  # its beat may be on the way
        here.now_s += 2.0
        here.handle(Tick())
        assert len(here.dispatcher.bookings) == 0


def test_a_placement_names_live_workers_and_is_announced_and_recorded() -> None:
    made = world()
    fill(made, ref("s2"), keys(8))
    answer, commands = made.ask(admit(tokens=1000))
    assert isinstance(answer, Placed)
    assert answer.prefill == ref("p2")  # the store with the prefix is on its host
    assert answer.decode in {ref("d1"), ref("d2")}
    assert [copy.key for copy in answer.reuse] == list(keys(8))
    announce, record = commands
    assert isinstance(announce, Announce)
    assert announce.made.new_tokens == 999 - 8 * BLOCK
    assert announce.made.prefill == NodeId("p2")
    assert announce.made.keys == keys(8)
    assert announce.made.hold_ms > answer.chosen.ttft_ms
    assert isinstance(record, RecordDecision)
    assert record.candidates[0] == answer.chosen
    assert record.considered == 2


def test_a_repeated_admit_gets_the_same_answer_and_books_nothing() -> None:
    made = world()
    first, _ = made.ask(admit())
    load = made.dispatcher.load()
    again, commands = made.ask(admit())
    assert again == first
    assert commands == []
    assert made.dispatcher.load() == load


def test_a_repeat_after_the_chosen_worker_died_is_placed_anew() -> None:
    made = world()
    first = made.placed()
    assert first.prefill is not None
    made.handle(MemberGone(first.prefill))
    second = made.placed()
    assert second.prefill not in {None, first.prefill}


def test_a_repeat_after_the_chosen_worker_restarted_is_placed_on_its_new_life() -> None:
    made = world(beat("p1", Role.PREFILL), beat("d1", Role.DECODE))
    assert made.placed().prefill == ref("p1", 1)
    made.handle(MemberSeen(beat("p1", Role.PREFILL, epoch=2)))
    assert made.placed().prefill == ref("p1", 2)


def test_stale_attempts_and_ended_requests_are_refused() -> None:
    made = world()
    made.placed(attempt=1)
    stale = made.rejected(attempt=0)
    assert (stale.code, stale.retry_after_ms) == (RejectCode.STALE_ATTEMPT, None)
    made.handle(EndHeard(ended(attempt=1)))
    assert made.rejected(attempt=2).code is RejectCode.STALE_ATTEMPT
    assert made.dispatcher.load().bookings == 0


def test_a_new_attempt_avoids_excluded_workers() -> None:
    made = world()
    first = made.placed()
    assert first.prefill is not None
    excluded = [first.prefill.node, first.decode.node]
    second = made.placed(attempt=1, excluded=excluded)
    assert second.prefill is not None
    assert second.prefill.node not in excluded
    assert second.decode.node not in excluded
    third = made.rejected(attempt=2, excluded=["p1", "p2"])
    assert third.code is RejectCode.NO_WORKERS
    assert "2 excluded" in third.reason
    assert third.retry_after_ms


@pytest.mark.parametrize(
    ("beats", "fields", "code"),
    [
        pytest.param((beat("g1", Role.GATEWAY),), {}, "no_workers", id="nobody"),
        pytest.param(
            (
                beat("p1", Role.PREFILL, state=NodeState.LOADING),
                beat("d1", Role.DECODE),
            ),
            {"model": "demo"},
            "no_workers",
            id="still loading",
        ),
        pytest.param(
            (
                beat("p1", Role.PREFILL, state=NodeState.DRAINING),
                beat("d1", Role.DECODE),
            ),
            {},
            "no_workers",
            id="draining",
        ),
        pytest.param((), {"model": "other"}, "unknown_model", id="unknown model"),
        pytest.param((), {"tokens": 4096}, "too_large", id="longer than the model"),
        pytest.param(
            (
                beat("p1", Role.PREFILL),
                beat("d1", Role.DECODE, load=DecodeLoad(kv_tokens_capacity=500)),
            ),
            {},
            "too_large",
            id="larger than any decode worker",
        ),
        pytest.param(
            (
                beat("p1", Role.PREFILL, load=PrefillLoad(queued_tokens=10**6)),
                beat("d1", Role.DECODE),
            ),
            {},
            "overloaded",
            id="a long queue",
        ),
        pytest.param((), {"ttft_ms": 1.0}, "overloaded", id="impossible target"),
    ],
)
def test_rejections_say_why(
    beats: tuple[Beat, ...], fields: dict[str, object], code: str
) -> None:
    made = world(*beats)
    answer, commands = made.ask(admit(**fields))  # pyright: ignore[reportArgumentType]
    assert isinstance(answer, Rejected)
    assert answer.code == code
    assert answer.reason
    assert made.dispatcher.load().bookings == 0
    (record,) = commands
    assert isinstance(record, RecordDecision)
    again, commands = made.ask(admit(**fields))  # pyright: ignore[reportArgumentType]
    assert (again, commands) == (answer, [])


def test_the_answer_counts_no_further_than_the_model_reaches() -> None:
    """max_tokens of 10^9 must not make a request too large for every worker."""
    made = world(
        beat("p1", Role.PREFILL),
        beat("d1", Role.DECODE, load=DecodeLoad(kv_tokens_capacity=4096)),
    )
    assert made.placed(max_new_tokens=10**9)


def test_copies_at_stores_that_are_gone_are_not_named() -> None:
    made = world()
    fill(made, ref("s1"), keys(8))
    fill(made, ref("s2"), keys(4))
    made.handle(MemberGone(ref("s1")))
    assert {copy.slot.node for copy in made.placed().reuse} == {"s2"}
    fill(made, ref("s1"), keys(8))  # gossip that comes after the death
    made.now_s += 10  # the link is free again
    reuse = made.placed(request="r2").reuse
    assert {copy.slot.node for copy in reuse} == {"s2"}
    made.handle(StoreForgotten(NodeId("s2")))
    assert made.placed(request="r3").reuse == ()


def test_bookings_spread_requests_before_any_report() -> None:
    made = world()
    chosen = [made.placed(request=f"r{n}", chain=()) for n in range(4)]
    prefills = [answer.prefill for answer in chosen]
    decodes = [answer.decode for answer in chosen]
    assert sorted(prefills, key=str) == sorted([ref("p1"), ref("p2")] * 2, key=str)
    assert sorted(decodes, key=str) == sorted([ref("d1"), ref("d2")] * 2, key=str)


def test_two_conductors_hear_each_others_bookings() -> None:
    one, other = world(me="c1"), world(me="c2")
    for each in (one, other):
        each.handle(MemberSeen(beat("c1", Role.CONDUCTOR)))
        each.handle(MemberSeen(beat("c2", Role.CONDUCTOR)))
    first, commands = one.ask(admit("r1", chain=()))
    assert isinstance(first, Placed)
    (made,) = [c.made for c in commands if isinstance(c, Announce)]
    for each in (one, other):
        each.handle(PlacementHeard(made))
        each.handle(PlacementHeard(made))  # twice
        assert each.dispatcher.load().bookings == 1
    second = other.placed(request="r2", chain=())
    assert second.prefill != first.prefill
    assert second.decode != first.decode
    # the same attempt, asked at the other one: the same workers
    again = other.placed(request="r1", chain=())
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
    assert other.dispatcher.load().bookings == 2


def test_only_the_conductor_that_placed_records_the_end() -> None:
    one, other = world(me="c1"), world(me="c2")
    for each in (one, other):
        each.handle(MemberSeen(beat("c1", Role.CONDUCTOR)))
    answer, commands = one.ask(admit())
    assert isinstance(answer, Placed)
    (made,) = [c.made for c in commands if isinstance(c, Announce)]
    other.handle(PlacementHeard(made))
    over = ended()
    assert other.handle(EndHeard(over)) == []
    predicted = answer.chosen
    assert one.handle(EndHeard(over)) == [RecordEnd(over, predicted)]
    assert one.dispatcher.load().bookings == other.dispatcher.load().bookings == 0


def test_another_conductor_records_the_end_when_the_placing_one_has_died() -> None:
    one, other = world(me="c1"), world(me="c2")
    _, commands = one.ask(admit())
    (made,) = [c.made for c in commands if isinstance(c, Announce)]
    other.handle(PlacementHeard(made))
    assert other.handle(EndHeard(ended())) == [RecordEnd(ended())]


def test_a_lost_end_is_made_good_by_the_gateways_own_count() -> None:
    made = world()
    made.handle(MemberSeen(beat("g1", Role.GATEWAY, load=GatewayLoad(open_requests=1))))
    made.placed(request="r1")
    made.now_s += 10
    made.handle(Tick())
    assert made.dispatcher.load().bookings == 1
    made.placed(request="r2")
    made.handle(MemberSeen(beat("g1", Role.GATEWAY, load=GatewayLoad())))
    made.handle(Tick())
    assert made.dispatcher.load().bookings == 1  # r2 may be on its way to the gateway
    made.now_s += 3
    made.handle(Tick())
    assert made.dispatcher.load().bookings == 0


def test_nodes_are_recorded_when_they_come_change_state_and_go() -> None:
    made = World()
    loading = beat("p1", Role.PREFILL, state=NodeState.LOADING)
    ready = beat("p1", Role.PREFILL)
    busy = beat("p1", Role.PREFILL, load=PrefillLoad(queued=1))
    assert made.handle(MemberSeen(loading)) == [RecordNode(loading)]
    assert made.handle(MemberSeen(ready)) == [RecordNode(ready)]
    assert made.handle(MemberSeen(busy)) == []
    assert made.handle(MemberGone(ref("p1", 9))) == []
    assert made.handle(MemberGone(ref("p1"))) == [RecordNodeGone(NodeId("p1"), busy)]
    assert made.handle(MemberGone(ref("p1"))) == []


def test_status_and_explanations() -> None:
    made = world()
    fill(made, ref("s1"), keys(3))
    placed = made.placed()
    members = tuple(
        Member(each, heard_s=999.0, stepped_s=999.0)
        for each in (beat("s1", Role.STORE), beat("s2", Role.STORE, host="h2"))
    )
    (reply,) = made.handle(StatusAsked(members, ReplyTo(7)))
    assert isinstance(reply, Reply)
    status = reply.message
    assert isinstance(status, StatusReply)
    assert [(view.blocks, view.age_ms) for view in status.nodes] == [
        (3, 1000.0),
        (0, 1000.0),
    ]
    counts = (status.indexed_blocks, status.indexed_copies, status.bookings)
    assert counts == (3, 3, 1)
    assert not status.exact
    made.handle(StoreExact(NodeId("s1"), exact=True))
    assert not made.dispatcher.exact
    made.handle(StoreExact(NodeId("s2"), exact=True))
    assert made.dispatcher.exact

    def explain(request: str) -> object:
        query = ExplainQuery(request=RequestId(request))
        (answer,) = made.handle(ExplainAsked(query, ReplyTo(8)))
        assert isinstance(answer, Reply)
        return answer.message

    explained = explain("r1")
    assert isinstance(explained, Explained)
    assert explained.candidates[0] == placed.chosen
    assert explained.reason == placed.reason
    unknown = explain("r0")
    assert isinstance(unknown, Failure)
    assert unknown.code == "unknown_request"


def test_a_fenced_conductor_drops_its_bookings_and_is_somebody_new() -> None:
    made = world()
    made.placed()
    made.handle(Fenced(ref("c1", 2)))
    assert made.dispatcher.load().bookings == 0
    _, commands = made.ask(admit("r2"))
    (announced,) = [c.made for c in commands if isinstance(c, Announce)]
    assert announced.conductor == ref("c1", 2)


def test_workers_that_disagree_on_the_model_are_not_mixed() -> None:
    new = msgspec.structs.replace  # for beats; facts are dataclasses
    other = type(FACTS)(
        **{
            name: getattr(FACTS, name)
            for name in FACTS.__dataclass_fields__
            if name != "digest"
        },
        digest="e" * 64,
    )
    made = world(
        beat("p1", Role.PREFILL, models=(other,)),
        beat("p2", Role.PREFILL),
        beat("d1", Role.DECODE),
        new(beat("d2", Role.DECODE, models=(other,)), state=NodeState.LOADING),
    )
    answer = made.placed()
    assert (answer.prefill, answer.decode) == (ref("p2"), ref("d1"))


def test_roster_events_become_member_events() -> None:
    old = Member(beat("p1", Role.PREFILL), 1.0, 1.0)
    new = Member(beat("p1", Role.PREFILL, epoch=2), 2.0, 2.0)
    assert member_events(Joined(old)) == (MemberSeen(old.beat),)
    assert member_events(Changed(old, old)) == (MemberSeen(old.beat),)
    assert member_events(Gone(old, GoneReason.SILENT)) == (MemberGone(old.ref),)
    assert member_events(Restarted(old, new)) == (
        MemberGone(old.ref),
        MemberSeen(new.beat),
    )
