"""Who is there, whatever the order, loss and repetition of beats."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus import (
    Changed,
    Gone,
    GoneReason,
    Joined,
    Restarted,
    Roster,
    RosterEvent,
    RosterTimes,
)
from kvtide.bus.messages import Beat, DecodeLoad, Goodbye, Load, NodeState
from kvtide.bus.roster import KNOWN_LIMIT
from kvtide.kv import NodeId, NodeRef, Role

TIMES = RosterTimes(dead_after_s=3.0, hung_after_s=30.0)


def ref(epoch: int = 1, node: str = "w") -> NodeRef:
    return NodeRef(NodeId(node), epoch)


def beat(
    seq: int,
    *,
    epoch: int = 1,
    node: str = "w",
    steps: int = 0,
    running: int | None = None,
    state: NodeState = NodeState.READY,
    protocol: int = 1,
) -> Beat:
    load: tuple[Load, ...] = ()
    if running is not None:
        load = (DecodeLoad(running=running),)
    return Beat(
        node=ref(epoch, node),
        roles=(Role.DECODE,),
        seq=seq,
        host="",
        state=state,
        steps=steps,
        load=load,
        protocol=protocol,
    )


def kinds(events: list[RosterEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_first_beat_joins_and_a_silence_ends() -> None:
    roster = Roster(TIMES)
    (joined,) = roster.beat(beat(1), 10.0)
    assert isinstance(joined, Joined)
    assert [m.ref for m in roster.live(Role.DECODE)] == [ref()]
    assert roster.live(Role.STORE) == ()
    assert roster.tick(13.0) == []
    (gone,) = roster.tick(13.1)
    assert gone == Gone(joined.member, GoneReason.SILENT)
    assert roster.live() == ()
    assert kinds(roster.beat(beat(2), 14.0)) == ["Joined"]


def test_only_news_are_changes() -> None:
    roster = Roster(TIMES)
    roster.beat(beat(1), 0.0)
    assert roster.beat(beat(2, steps=5), 0.5) == []
    (changed,) = roster.beat(beat(3, state=NodeState.DRAINING), 1.0)
    assert isinstance(changed, Changed)
    assert changed.before.beat.state is NodeState.READY
    assert not changed.member.ready


def test_old_and_repeated_beats_are_nothing() -> None:
    roster = Roster(TIMES)
    roster.beat(beat(5), 0.0)
    assert roster.beat(beat(5), 2.0) == []
    assert roster.beat(beat(4, state=NodeState.DRAINING), 2.0) == []
    assert kinds(roster.tick(3.1)) == ["Gone"], "they did not prolong its life"


def test_a_later_life_replaces_and_the_older_one_is_fenced() -> None:
    roster = Roster(TIMES)
    roster.beat(beat(9), 0.0)
    (restarted,) = roster.beat(beat(1, epoch=2), 1.0)
    assert isinstance(restarted, Restarted)
    assert (restarted.before.ref, restarted.member.ref) == (ref(1), ref(2))
    assert roster.beat(beat(10), 1.0) == []
    assert not roster.is_current(ref(1))
    assert roster.is_current(ref(2))
    assert roster.is_live(ref(2))
    assert not roster.is_live(ref(1))


def test_any_message_of_a_later_life_fences_the_older_one() -> None:
    roster = Roster(TIMES)
    roster.beat(beat(1), 0.0)
    assert roster.is_current(ref(7))
    assert roster.beat(beat(2), 0.5) == []
    assert kinds(roster.beat(beat(1, epoch=7), 0.6)) == ["Restarted"]


def test_a_goodbye_ends_at_once_and_late_beats_are_late() -> None:
    roster = Roster(TIMES)
    roster.beat(beat(1), 0.0)
    (gone,) = roster.goodbye(Goodbye(node=ref()))
    assert isinstance(gone, Gone)
    assert gone.reason is GoneReason.GOODBYE
    assert roster.beat(beat(2), 0.1) == []
    assert kinds(roster.beat(beat(1, epoch=2), 0.2)) == ["Joined"]
    assert roster.goodbye(Goodbye(node=ref())) == []


def test_work_without_steps_is_hung_until_it_steps() -> None:
    roster = Roster(TIMES)
    seq, now_s = 0, 0.0
    events: list[RosterEvent] = []
    while now_s <= 31.0:
        seq += 1
        events += roster.beat(beat(seq, steps=7, running=1), now_s)
        events += roster.tick(now_s)
        now_s += 0.5
    assert kinds(events) == ["Joined", "Gone"]
    gone = events[-1]
    assert isinstance(gone, Gone)
    assert gone.reason is GoneReason.HUNG
    assert roster.beat(beat(seq + 1, steps=7, running=1), now_s) == []
    assert kinds(roster.beat(beat(seq + 2, steps=8, running=1), now_s)) == ["Joined"]


def test_how_many_hung_nodes_are_remembered_is_bounded() -> None:
    roster = Roster(RosterTimes(dead_after_s=100.0, hung_after_s=30.0))
    names = [f"w{number:05}" for number in range(KNOWN_LIMIT + 1)]
    for name in names:
        roster.beat(beat(1, node=name, running=1), 0.0)
    assert len(roster.tick(31.0)) == len(names)
    assert roster.beat(beat(2, node=names[-1], running=1), 32.0) == []
    assert kinds(roster.beat(beat(2, node=names[0], running=1), 32.0)) == ["Joined"]


@pytest.mark.parametrize(("steps", "running"), [(1, 1), (0, 0), (0, None)])
def test_a_busy_or_idle_node_is_not_hung(steps: int, running: int | None) -> None:
    roster = Roster(TIMES)
    for seq in range(200):
        roster.beat(beat(seq + 1, steps=steps * seq, running=running), seq * 0.5)
        assert roster.tick(seq * 0.5) == []


def test_one_who_was_deaf_takes_nobody_for_dead() -> None:
    roster = Roster(TIMES)
    roster.beat(beat(1), 0.0)
    roster.grace(100.0)
    assert roster.tick(102.0) == []
    assert kinds(roster.tick(103.1)) == ["Gone"]


def test_another_protocol_is_nobody() -> None:
    roster = Roster(TIMES)
    assert roster.beat(beat(1, protocol=2), 0.0) == []
    assert roster.live() == ()


@dataclass
class Told:
    """What one who only hears events believes."""

    live: dict[NodeId, NodeRef] = field(default_factory=dict[NodeId, NodeRef])

    def hear(self, events: list[RosterEvent]) -> None:
        for event in events:
            node = event.member.node
            match event:
                case Joined(member):
                    assert node not in self.live
                    self.live[node] = member.ref
                case Changed(before, member):
                    assert self.live[node] == before.ref == member.ref
                case Restarted(before, member):
                    assert self.live[node] == before.ref
                    assert member.ref.epoch > before.ref.epoch
                    self.live[node] = member.ref
                case Gone(member):
                    assert self.live.pop(node) == member.ref


BEATS = st.builds(
    beat,
    st.integers(1, 6),
    epoch=st.integers(1, 3),
    node=st.sampled_from(["a", "b"]),
    steps=st.integers(0, 2),
    running=st.sampled_from([None, 0, 1]),
    state=st.sampled_from(list(NodeState)),
)
GOODBYES = st.builds(
    Goodbye, node=st.builds(ref, st.integers(1, 3), st.sampled_from(["a", "b"]))
)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 20.0), st.one_of(BEATS, BEATS, GOODBYES, st.none())),
        max_size=60,
    )
)
@settings(max_examples=300, deadline=None)
def test_its_events_tell_all_and_lives_only_advance(
    steps: list[tuple[float, Beat | Goodbye | None]],
) -> None:
    roster, told, now_s = Roster(TIMES), Told(), 0.0
    newest: dict[NodeId, int] = {}
    for wait_s, event in steps:
        now_s += wait_s
        match event:
            case Beat():
                told.hear(roster.beat(event, now_s))
            case Goodbye():
                told.hear(roster.goodbye(event))
            case None:
                told.hear(roster.tick(now_s))
        if event is not None:
            node, epoch = event.node.node, event.node.epoch
            newest[node] = max(epoch, newest.get(node, 0))
        assert {m.node: m.ref for m in roster.live()} == told.live
        for member in roster.live():
            assert member.ref.epoch <= newest[member.node] == roster.epoch(member.node)
    told.hear(roster.tick(now_s + 100.0))
    assert told.live == {}


def test_a_beat_with_fields_of_later_versions_is_read() -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(beat(1)))
    raw["added_later"] = 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=Beat) == beat(1)
