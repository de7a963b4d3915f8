"""A tenant's home alone grants, also while conductors come, go, and lose their memory."""

from collections.abc import Sequence

from hypothesis import given, settings, strategies as st
from tests.unit.conductor_cluster import admit, beat, ended, ref

from kvtide.bus.messages import (
    GrantDenied,
    Granted,
    Placed,
    RejectCode,
    Rejected,
    TenantUse,
    UseQuery,
)
from kvtide.conductor.commands import Announce, Command, Consult, Reply
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import (
    AdmitAsked,
    EndHeard,
    GrantWanted,
    MemberGone,
    MemberSeen,
    PlacementHeard,
    ReplyTo,
    Tick,
    Unanswered,
    UseAsked,
    Word,
)
from kvtide.conductor.quota import TenantQuota
from kvtide.conductor.serving import ServingRules
from kvtide.kv import NodeId, NodeRef, Role, TenantId, rendezvous_order

T = TenantId("t")
HOME, OTHER = (each.node for each in rendezvous_order(T, [ref("c1"), ref("c2")]))
TO = ReplyTo(1)


class World:
    """Conductors whose questions to one another always arrive.

    With ``slow`` gossip placements are heard when ``heard`` is called, else at once.
    """

    def __init__(self, *names: str, slow: bool = False, **quota: float) -> None:
        self.slow = slow
        self.unheard: list[Announce] = []
        self.quota = TenantQuota(**quota)  # pyright: ignore[reportArgumentType]
        self.minds: dict[NodeId, Dispatcher] = {}
        self.knowing: set[NodeId] = {NodeId(name) for name in names}
        """Who was there from the beginning, or has asked one of them for the use."""
        self.epoch = 0
        self.began: dict[NodeRef, int] = {}
        self.now_s = 1000.0
        self.cluster = [
            beat("p1", Role.PREFILL),
            beat("d1", Role.DECODE),
            beat("s1", Role.STORE),
            beat("g1", Role.GATEWAY),
        ]
        for name in names:
            self.start(NodeId(name))

    def start(self, name: NodeId) -> None:
        self.epoch += 1
        serving = ServingRules(quotas={T: self.quota})
        mind = Dispatcher(NodeRef(name, self.epoch), serving=serving)
        self.minds[name] = mind
        self.began[mind.me] = self.epoch
        for seen in self.cluster:
            mind.handle(MemberSeen(seen), self.now_s)
        for each in self.minds.values():
            for other in self.minds.values():
                self._introduce(each, other)

    def _introduce(self, mind: Dispatcher, other: Dispatcher) -> None:
        me = other.me
        age = self.epoch - self.began[me] + 1
        seen = beat(me.node, Role.CONDUCTOR, epoch=me.epoch, seq=age)
        mind.handle(MemberSeen(seen), self.now_s)

    def kill(self, name: NodeId) -> None:
        gone = self.minds.pop(name)
        self.knowing.discard(name)
        for mind in self.minds.values():
            mind.handle(MemberGone(gone.me), self.now_s)

    def ask(self, name: NodeId, request: str) -> Placed | Rejected:
        question = AdmitAsked(admit(request, max_new_tokens=100), TO)
        commands = self.minds[name].handle(question, self.now_s)
        for _ in range(4):
            if not isinstance(commands[0], Consult):
                break
            word = self.word(name, commands[0])
            question = AdmitAsked(question.admit, TO, word)
            commands = self.minds[name].handle(question, self.now_s)
        self.spread(commands)
        assert isinstance(commands[0], Reply), commands
        assert isinstance(commands[0].message, Placed | Rejected)
        return commands[0].message

    def word(self, asker: NodeId, consult: Consult) -> Word:
        mind = self.minds.get(consult.conductor)
        if mind is None:
            return Unanswered(consult.conductor, gone=True, retry_after_ms=0)
        if isinstance(consult.message, UseQuery):
            (reply,) = mind.handle(UseAsked(consult.message, TO), self.now_s)
            if consult.conductor in self.knowing:
                self.knowing.add(asker)
            assert isinstance(reply, Reply)
            assert isinstance(reply.message, TenantUse)
        else:
            wanted = GrantWanted(consult.message, TO)
            (reply,) = mind.handle(wanted, self.now_s)
            while isinstance(reply, Consult):
                wanted = GrantWanted(
                    consult.message, TO, self.word(consult.conductor, reply)
                )
                (reply,) = mind.handle(wanted, self.now_s)
        assert isinstance(reply, Reply)
        return reply.message  # pyright: ignore[reportReturnType]

    def spread(self, commands: Sequence[Command]) -> None:
        self.unheard += [each for each in commands if isinstance(each, Announce)]
        if not self.slow:
            self.heard()

    def heard(self) -> None:
        for command in self.unheard:
            for mind in self.minds.values():
                mind.handle(PlacementHeard(command.made), self.now_s)
        self.unheard.clear()

    def end(self, request: str) -> None:
        for mind in self.minds.values():
            mind.handle(EndHeard(ended(request)), self.now_s)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for mind in self.minds.values():
            mind.handle(Tick(), self.now_s)

    def placed(self, name: NodeId, *requests: str) -> int:
        return sum(isinstance(self.ask(name, each), Placed) for each in requests)


def test_a_conductor_that_is_not_the_home_asks_it() -> None:
    world = World("c1", "c2", concurrent_requests=2)
    question = AdmitAsked(admit("r1"), TO)
    (consult,) = world.minds[OTHER].handle(question, world.now_s)
    assert isinstance(consult, Consult)
    assert consult.conductor == HOME
    assert world.placed(OTHER, "r1", "r2", "r3") == 2
    assert world.placed(HOME, "r4") == 0
    refused = world.ask(OTHER, "r5")
    assert isinstance(refused, Rejected)
    assert refused.code is RejectCode.TENANT_LIMIT
    assert refused.retry_after_ms is not None
    world.end("r1")
    assert world.placed(OTHER, "r6") == 1


def test_tenants_without_limits_ask_nobody() -> None:
    world = World("c1", "c2")
    for name in (HOME, OTHER):
        (reply, *_) = world.minds[name].handle(AdmitAsked(admit("r1"), TO), 1000.0)
        assert isinstance(reply, Reply)


def test_a_home_that_came_anew_takes_over_what_was_used() -> None:
    world = World("c1", "c2", requests_per_min=4)
    assert world.placed(HOME, "r1", "r2") == 2
    world.kill(HOME)
    assert world.placed(OTHER, "r3") == 1
    world.start(HOME)
    assert world.placed(HOME, "r4", "r5", "r6") == 1
    world.pass_s(16)
    assert world.placed(OTHER, "r7", "r8") == 1


def test_two_of_three_that_came_anew_learn_from_the_third() -> None:
    world = World("c1", "c2", "c3", requests_per_min=4)
    first, second, third = (
        each.node for each in rendezvous_order(T, map(ref, ("c1", "c2", "c3")))
    )
    assert world.placed(first, "r1", "r2", "r3") == 3
    for name in (first, second):
        world.kill(name)
    for name in (second, first):
        world.start(name)
    assert third in world.minds
    assert world.placed(first, "r4", "r5", "r6") == 1


def test_an_end_that_comes_before_its_placement_is_charged() -> None:
    world = World("c1", "c2", slow=True, requests_per_min=4)
    assert world.placed(HOME, "r1") == 1
    world.end("r1")
    world.heard()
    world.kill(HOME)
    assert world.placed(OTHER, "r2", "r3", "r4", "r5", "r6") == 3


def test_a_silent_home_is_not_replaced_while_it_may_grant() -> None:
    world = World("c1", "c2", concurrent_requests=2)
    word = Unanswered(HOME, gone=False, retry_after_ms=1700)
    asked = AdmitAsked(admit("r1"), TO, word)
    (reply, *_) = world.minds[OTHER].handle(asked, world.now_s)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Rejected)
    assert (reply.message.code, reply.message.retry_after_ms) == (
        RejectCode.TENANT_LIMIT,
        1700,
    )
    # one of whom the server says that nobody listens grants nothing more
    gone = AdmitAsked(admit("r2"), TO, Unanswered(HOME, gone=True, retry_after_ms=0))
    (reply, *_) = world.minds[OTHER].handle(gone, world.now_s)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Placed)


def test_what_is_lent_and_comes_to_nothing_is_given_back() -> None:
    world = World("c1", "c2", concurrent_requests=1)
    (consult,) = world.minds[OTHER].handle(AdmitAsked(admit("r1"), TO), world.now_s)
    assert isinstance(consult, Consult)
    assert isinstance(world.word(OTHER, consult), Granted)
    assert isinstance(world.word(OTHER, consult), Granted)
    assert world.placed(HOME, "r2") == 0
    world.pass_s(6)
    assert world.placed(HOME, "r3") == 1
    denied = world.word(OTHER, consult)
    assert isinstance(denied, GrantDenied)


def test_a_dead_gateway_holds_nothing() -> None:
    world = World("c1", "c2", concurrent_requests=1)
    assert world.placed(HOME, "r1") == 1
    for mind in world.minds.values():
        mind.handle(MemberGone(ref("g1")), world.now_s)
    assert world.placed(OTHER, "r2") == 1


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "end", "kill", "start", "pass"]),
            st.integers(0, 2),
            st.integers(0, 40),
        ),
        max_size=80,
    )
)
def test_conductors_together_never_grant_more_than_the_quota(
    story: list[tuple[str, int, int]],
) -> None:
    """As long as one that knows the use lives on, whoever is home or asked.

    One that starts anew learns of it when it becomes the home: from the next in line, and
    from the one that has lived longest, should the next have been started anew as well.

    Placements are heard before a conductor goes or comes, not at once.
    """
    names = [NodeId(f"c{number}") for number in range(1, 4)]
    world = World(*names, slow=True, requests_per_min=4, concurrent_requests=3)
    open_: set[str] = set()
    granted: list[float] = []
    for what, which, number in story:
        name = names[which]
        match what:
            case "ask" if name in world.minds:
                request = f"r{len(granted)}-{number}"
                if isinstance(world.ask(name, request), Placed):
                    granted.append(world.now_s)
                    open_.add(request)
            case "end" if open_:
                request = sorted(open_)[number % len(open_)]
                open_.discard(request)
                world.end(request)
            case "kill" if name in world.minds and world.knowing - {name}:
                world.heard()
                world.kill(name)
            case "start" if name not in world.minds:
                world.heard()
                world.start(name)
            case "pass":
                world.heard()
                world.pass_s(number / 10)
            case _:
                pass
        assert len(open_) <= 3
        for first, at_s in enumerate(granted):
            within = len(granted) - first
            assert within <= 4 + (world.now_s - at_s) * 4 / 60
