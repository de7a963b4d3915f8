"""Two conductors under any order of events, with messages lost and doubled."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from tests.unit.conductor_cluster import (
    BLOCK,
    admit,
    beat,
    ended,
    key,
    located,
    ref,
)
from typing_extensions import override

from kvtide.bus.messages import (
    DecodeLoad,
    Dropped,
    NodeState,
    Placed,
    PlacementMade,
    PrefillLoad,
    Rejected,
    StatusReply,
)
from kvtide.conductor.commands import (
    Announce,
    RecordEnd,
    Reply,
)
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import (
    AdmitAsked,
    BlocksMoved,
    EndHeard,
    Event,
    Fenced,
    MemberGone,
    MemberSeen,
    PlacementHeard,
    ReplyTo,
    StatusAsked,
    Tick,
)
from kvtide.conductor.quota import TenantQuota
from kvtide.conductor.serving import ServingRules
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Role, TenantId
from kvtide.policy import (
    Ask,
    ColumnPolicy,
    Fleet,
    Placement,
    PolicyName,
    Refusal,
    Targets,
    rules_of,
)
from kvtide.policy.columns import Holdings

pytestmark = pytest.mark.timeout(180)  # many examples; seconds on a free machine

NAMES = {
    "p1": Role.PREFILL,
    "p2": Role.PREFILL,
    "d1": Role.DECODE,
    "d2": Role.DECODE,
    "s1": Role.STORE,
    "s2": Role.STORE,
    "g1": Role.GATEWAY,
}
HOSTS = {"p2": "h2", "d2": "h2", "s2": "h2"}
NODES = st.sampled_from(sorted(NAMES))
STORES = st.sampled_from(["s1", "s2"])
REQUESTS = st.integers(0, 11).map(lambda n: f"r{n}")


class WatchedPolicy(ColumnPolicy):
    """Looks at the loads that a decision is made on: none is ever below zero.

    What is ``coming`` is a change of load, and may be.
    """

    @override
    def place(self, ask: Ask, holdings: Holdings, fleet: Fleet) -> Placement | Refusal:
        assert (fleet.outflows >= 0).all()
        for columns in (fleet.prefills, fleet.decodes):
            for name in (field.name for field in fields(columns)):
                column = getattr(columns, name)
                if isinstance(column, np.ndarray) and "coming" not in name:
                    assert not (column < 0).any(), (name, column)
        return super().place(ask, holdings, fleet)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Two conductors, a cluster that comes and goes, messages lost and doubled."""

    def __init__(self) -> None:
        super().__init__()
        targets = Targets(queue_ms=5000)
        quota = TenantQuota(concurrent_requests=5)
        serving = ServingRules(quotas={TenantId("t"): quota})
        self.minds = [
            Dispatcher(
                ref(name), policy=WatchedPolicy(rules, targets=targets), serving=serving
            )
            for name, rules in (
                ("c1", rules_of(PolicyName.BEST)),
                ("c2", rules_of(PolicyName.ALGORITHM1)),
            )
        ]
        self.now_s = 1000.0
        self.questions = 0
        self.asked: set[str] = set()
        self.live: dict[str, int] = {}
        self.ready: set[str] = set()
        self.epochs = dict.fromkeys(NAMES, 0)
        self.copies: dict[tuple[str, BlockKey], Located] = {}
        self.answers: dict[tuple[int, str, int], Placed | Rejected] = {}
        self.said: list[PlacementMade] = []

    def tell(self, event: Event) -> None:
        for mind in self.minds:
            for command in mind.handle(event, self.now_s):
                assert not isinstance(command, Reply)

    @initialize(absent=st.sets(NODES, max_size=2), held=st.integers(0, 8))
    def starts(self, absent: set[str], held: int) -> None:
        for name in NAMES:
            if name not in absent:
                self.beats(name, new_life=True, tokens=0)
        for block in range(held):
            self.stores("s1" if block % 4 else "s2", block, use=1)

    @rule(name=NODES, new_life=st.booleans(), tokens=st.integers(-5000, 20_000))
    def beats(self, name: str, new_life: bool, tokens: int) -> None:
        if new_life or name not in self.live:
            self.epochs[name] += 1
            self.lose_blocks(name)
        self.live[name] = self.epochs[name]
        self.ready.add(name)
        load = {
            Role.PREFILL: PrefillLoad(queued_tokens=tokens),
            Role.DECODE: DecodeLoad(
                kv_tokens_capacity=20_000, kv_tokens_used=tokens, fill_tokens=tokens
            ),
        }.get(NAMES[name])
        host = HOSTS.get(name, "h1")
        seen = beat(name, NAMES[name], epoch=self.epochs[name], load=load, host=host)
        self.tell(MemberSeen(seen))

    @rule()
    def all_are_there_again(self) -> None:
        for name in sorted(NAMES.keys() - self.ready):
            self.beats(name, new_life=False, tokens=-1)

    @rule(name=NODES)
    def drains(self, name: str) -> None:
        if name in self.live:
            self.ready.discard(name)
            state = NodeState.DRAINING
            epoch = self.live[name]
            host = HOSTS.get(name, "h1")
            seen = beat(name, NAMES[name], epoch=epoch, state=state, host=host)
            self.tell(MemberSeen(seen))

    @rule(name=NODES)
    def dies(self, name: str) -> None:
        if name in self.live:
            self.tell(MemberGone(ref(name, self.live.pop(name))))
            self.ready.discard(name)
            self.lose_blocks(name)

    @rule(name=STORES, block=st.integers(0, 7), use=st.integers(1, 3))
    def stores(self, name: str, block: int, use: int) -> None:
        if name in self.live:
            store = ref(name, self.live[name])
            copy = located(key(block), store, generation=use)
            self.tell(BlocksMoved(store, [copy], []))
            self.copies[name, key(block)] = copy

    @rule(name=STORES, block=st.integers(0, 7))
    def evicts(self, name: str, block: int) -> None:
        copy = self.copies.pop((name, key(block)), None)
        if copy is not None and name in self.live:
            drop = Dropped(copy.key, copy.slot.generation)
            self.tell(BlocksMoved(copy.slot.owner, [], [drop]))

    @rule(
        which=st.integers(0, 1),
        request=REQUESTS,
        attempt=st.integers(0, 2),
        tokens=st.integers(1, 8 * BLOCK),
        excluded=st.sets(st.sampled_from(["p1", "p2", "d1"]), max_size=2),
    )
    def asks(
        self,
        which: int,
        request: str,
        attempt: int,
        tokens: int,
        excluded: set[str],
    ) -> None:
        question = admit(
            request, attempt=attempt, tokens=tokens, excluded=sorted(excluded)
        )
        self.questions += 1
        self.asked.add(request)
        event = AdmitAsked(question, ReplyTo(self.questions))
        commands = self.minds[which].handle(event, self.now_s)
        replies = [command for command in commands if isinstance(command, Reply)]
        assert [reply.reply_to for reply in replies] == [self.questions]
        answer = replies[0].message
        assert isinstance(answer, Placed | Rejected)
        assert (answer.request, answer.attempt) == (question.request, attempt)
        self.said += [c.made for c in commands if isinstance(c, Announce)]
        if isinstance(answer, Placed):
            self.is_sound(
                answer, {NodeId(name) for name in excluded}, fresh=len(commands) > 1
            )

    @rule(which=st.integers(0, 1), first=st.integers(0, 8))
    def several_ask(self, which: int, first: int) -> None:
        for number in range(first, first + 4):
            tokens = (1 + number % 8) * BLOCK
            self.asks(which, f"r{number}", attempt=0, tokens=tokens, excluded=set())

    def is_sound(self, answer: Placed, excluded: set[NodeId], *, fresh: bool) -> None:
        for chosen in (answer.prefill, answer.decode):
            if chosen is not None:
                assert self.live.get(chosen.node) == chosen.epoch
                assert chosen.node not in excluded
                # a repeat may name one that has begun to drain since
                assert not fresh or chosen.node in self.ready
        if fresh:
            for number, copy in enumerate(answer.reuse):
                assert copy.key == key(number)
                assert self.copies[copy.slot.node, copy.key] == copy

    @rule(which=st.integers(0, 1), pick=st.integers(0, 30))
    def hears(self, which: int, pick: int) -> None:
        """Placements are heard late, twice, or never."""
        if self.said:
            made = self.said[pick % len(self.said)]
            assert self.minds[which].handle(PlacementHeard(made), self.now_s) == []

    @rule(request=REQUESTS, which=st.sets(st.integers(0, 1)))
    def ends(self, request: str, which: set[int]) -> None:
        for number in which:
            over = ended(request, attempt=2)
            commands = self.minds[number].handle(EndHeard(over), self.now_s)
            assert len(commands) <= 1
            assert all(
                isinstance(each, RecordEnd) and each.ended == over for each in commands
            )

    @rule(which=st.integers(0, 1))
    def wakes_up(self, which: int) -> None:
        me = self.minds[which].me
        later = NodeRef(me.node, me.epoch + 1)
        assert self.minds[which].handle(Fenced(later), self.now_s) == []

    @rule(seconds=st.sampled_from([0.0, 0.2, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(Tick())

    @invariant()
    def the_index_knows_what_is_there(self) -> None:
        for mind in self.minds:
            (reply,) = mind.handle(StatusAsked((), ReplyTo(0)), self.now_s)
            assert isinstance(reply, Reply)
            status = reply.message
            assert isinstance(status, StatusReply)
            assert status.indexed_copies == len(self.copies)
            assert 0 <= status.bookings <= len(self.asked)

    @invariant()
    def nothing_booked_is_negative(self) -> None:
        for mind in self.minds:
            for node in map(NodeId, NAMES):
                assert mind.bookings.prefill_ms(node) >= 0
                assert mind.bookings.decode_tokens(node) >= 0
                assert mind.bookings.fill_tokens(node) >= 0
                assert 0 <= mind.bookings.decode_requests(node) <= len(mind.bookings)

    def lose_blocks(self, name: str) -> None:
        self.copies = {k: v for k, v in self.copies.items() if k[0] != name}


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
