"""Nodes see each other, lose each other, and fence themselves after a pause."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvtide.bus import (
    BlockFollower,
    Changed,
    FaultyNetwork,
    FollowTimes,
    Gone,
    GoneReason,
    Hop,
    Identity,
    Incoming,
    Joined,
    MemoryBus,
    MemoryHub,
    NetworkFaults,
    Node,
    NodeTimes,
    Restarted,
    RosterEvent,
)
from kvtide.bus.messages import (
    Ack,
    BlocksChanged,
    DecodeLoad,
    Dropped,
    Message,
    NodeState,
    SnapshotPage,
    SnapshotPull,
    StatusQuery,
    StoreLoad,
)
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Role, SlotRef, Tier
from kvtide.runtime import ManualClock
from kvtide.transfer import MemoryFabric

SECRET = b"s" * 32
TIMES = NodeTimes()


class PausingClock(ManualClock):
    """A clock that can also jump, as it seems to a process that was stopped."""

    def pause(self, seconds: float) -> None:
        self._now_s += seconds


@dataclass
class Cluster:
    """Nodes on one hub, in time that moves when told."""

    clock: PausingClock = field(default_factory=PausingClock)

    def __post_init__(self) -> None:
        self.network = FaultyNetwork(seed=1)
        self.hub = MemoryHub(self.clock, self.network)
        self.fabric = MemoryFabric(self.clock)
        self.stack = AsyncExitStack()

    async def node(
        self, name: str, role: Role = Role.DECODE, *, epoch: int = 1
    ) -> Node:
        identity = Identity(NodeId(name), epoch)
        enter = self.stack.enter_async_context
        endpoint = await enter(self.fabric.endpoint(node=name, epoch=epoch))
        bus = await enter(MemoryBus(self.hub, identity, endpoint=endpoint))
        return await enter(
            Node(
                roles=(role,),
                bus=bus,
                identity=identity,
                clock=self.clock,
                secret=SECRET,
                endpoint=endpoint,
                times=TIMES,
                host="host-0",
            )
        )

    async def run(self, seconds: float) -> None:
        """Let time pass in small steps, so that all tasks see it."""
        left_s = seconds
        while left_s > 0:
            await self.clock.advance(min(0.05, left_s))
            left_s -= 0.05


@asynccontextmanager
async def cluster_of() -> AsyncGenerator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        closing = asyncio.ensure_future(cluster.stack.aclose())
        while not closing.done():
            await cluster.run(0.5)
        await closing
        await cluster.hub.close()


def names(node: Node) -> list[str]:
    return [member.node for member in node.roster.live()]


def heard(node: Node) -> list[RosterEvent]:
    events: list[RosterEvent] = []
    node.on_member(events.append)
    return events


async def test_nodes_see_each_other_and_themselves() -> None:
    async with cluster_of() as cluster:
        left, right = await cluster.node("left"), await cluster.node("right")
        await cluster.run(1.0)
        assert names(left) == names(right) == ["left", "right"]
        member = left.roster.get(NodeId("right"))
        assert member is not None
        assert member.beat.transfer == right.endpoint.address
        assert member.beat.host == right.host == "host-0"
        assert member.beat.state is NodeState.LOADING


async def test_a_change_is_heard_soon_and_only_once() -> None:
    async with cluster_of() as cluster:
        left, right = await cluster.node("left"), await cluster.node("right")
        await cluster.run(1.0)
        events = heard(left)
        joined = [e.member.node for e in events if isinstance(e, Joined)]
        assert joined == ["left", "right"]
        right.set_state(NodeState.READY)
        right.report(DecodeLoad(running=1))
        right.report(DecodeLoad(running=1))
        await cluster.run(TIMES.beat_gap_s * 2)
        changes = [e for e in events[2:] if isinstance(e, Changed)]
        assert 1 <= len(changes) <= 2
        assert changes[-1].member.ready
        assert changes[-1].member.beat.load == (DecodeLoad(running=1),)
        assert right.state is NodeState.READY


async def test_many_changes_make_few_beats() -> None:
    async with cluster_of() as cluster:
        left, right = await cluster.node("left"), await cluster.node("right")
        await cluster.run(1.0)
        first = left.roster.get(NodeId("right"))
        for index in range(100):
            right.report(DecodeLoad(running=index))
            await cluster.run(0.01)
        last = left.roster.get(NodeId("right"))
        assert first is not None
        assert last is not None
        assert last.beat.seq - first.beat.seq <= 1.1 / TIMES.beat_gap_s


async def test_steps_and_the_class_travel_with_beats() -> None:
    async with cluster_of() as cluster:
        left, right = await cluster.node("left"), await cluster.node("right")
        right.count_step()
        right.count_step(4)
        right.set_worker_class("quick")
        await cluster.run(1.0)
        member = left.roster.get(NodeId("right"))
        assert member is not None
        assert (member.beat.steps, member.beat.worker_class) == (5, "quick")


async def test_a_silent_node_goes_and_comes_back() -> None:
    async with cluster_of() as cluster:
        left, _ = await cluster.node("left"), await cluster.node("right")
        await cluster.run(1.0)
        events = heard(left)[2:]
        left.on_member(events.append)
        cluster.network.cut([NodeId("left")], [NodeId("right")])
        await cluster.run(4.0)
        assert names(left) == ["left"]
        cluster.network.heal()
        await cluster.run(1.0)
        assert names(left) == ["left", "right"]
        told = [e for e in events if e.member.node == "right"]
        assert isinstance(told[-1], Joined)
        assert isinstance(told[-2], Gone)
        assert told[-2].reason is GoneReason.SILENT


async def test_one_who_is_cut_off_takes_nobody_for_dead() -> None:
    async with cluster_of() as cluster:
        left, right = await cluster.node("left"), await cluster.node("right")
        await cluster.run(1.0)
        cluster.hub.disconnect(NodeId("left"))
        cluster.hub.disconnect(NodeId("right"))
        await cluster.run(10.0)
        assert names(left) == names(right) == ["left", "right"]
        cluster.hub.reconnect(NodeId("left"))
        await cluster.run(2.0)
        assert names(left) == ["left", "right"], "not heard for a short time only"
        await cluster.run(2.0)
        assert names(left) == ["left"]


async def test_a_closed_node_says_goodbye() -> None:
    async with cluster_of() as cluster:
        left, right = await cluster.node("left"), await cluster.node("right")
        await cluster.run(1.0)
        events = heard(left)
        await right.close()
        await cluster.run(0.05)
        assert names(left) == ["left"]
        gone = events[-1]
        assert isinstance(gone, Gone)
        assert gone.reason is GoneReason.GOODBYE
        await cluster.run(2.0)
        assert names(left) == ["left"]


async def test_a_later_life_fences_the_earlier_one() -> None:
    async with cluster_of() as cluster:
        left = await cluster.node("left")
        old = await cluster.node("right", epoch=1)
        await cluster.run(1.0)
        events = heard(left)
        await cluster.node("right", epoch=2)
        await cluster.run(0.2)
        assert any(isinstance(event, Restarted) for event in events)
        got: list[Incoming] = []

        async def keep(incoming: Incoming) -> Message | None:
            got.append(incoming)
            return Ack()

        await left.inbox(Role.DECODE, Hop.CONTROL, keep)
        subject = left.subjects.inbox(Role.DECODE, NodeId("left"), Hop.CONTROL)
        await old.bus.publish(subject, StatusQuery())
        await cluster.run(0.1)
        assert got == []


async def test_a_pause_begins_a_new_life_before_the_next_beat() -> None:
    async with cluster_of() as cluster:
        left, right = await cluster.node("left"), await cluster.node("right")
        await cluster.run(1.0)
        right.report(DecodeLoad(running=3))
        await cluster.run(1.0)
        fenced: list[NodeRef] = []
        right.on_fenced(fenced.append)
        events = heard(left)
        # time that nobody saw pass: the whole process stood still
        cluster.clock.pause(10.0)
        await cluster.run(1.0)
        assert fenced == [NodeRef(NodeId("right"), 2)]
        assert right.ref == fenced[0]
        restarted = [e for e in events if isinstance(e, Restarted)]
        assert [e.member.ref for e in restarted if e.member.node == "right"] == fenced
        assert restarted[-1].member.beat.load == ()


async def test_a_short_pause_is_none() -> None:
    async with cluster_of() as cluster:
        right = await cluster.node("right")
        await cluster.run(1.0)
        cluster.clock.pause(2.0)
        await cluster.run(1.0)
        assert right.ref.epoch == 1


async def test_a_callback_that_raises_does_not_stop_the_others() -> None:
    async with cluster_of() as cluster:
        left = await cluster.node("left")

        def broken(event: RosterEvent) -> None:
            raise ZeroDivisionError(event.member.node)

        left.on_member(broken)
        events = heard(left)
        await cluster.node("right")
        await cluster.run(1.0)
        assert "right" in [event.member.node for event in events]


@dataclass
class Sink:
    """Keeps what a follower tells."""

    blocks: dict[BlockKey, Located] = field(default_factory=dict[BlockKey, Located])
    exact_of: dict[NodeId, bool] = field(default_factory=dict[NodeId, bool])

    def apply(
        self,
        store: NodeRef,
        added: Sequence[Located],
        dropped: Sequence[Dropped],
    ) -> None:
        for drop in dropped:
            self.blocks.pop(drop.key, None)
        self.blocks.update({copy.key: copy for copy in added})

    def forget(self, store: NodeId) -> None:
        self.blocks.clear()

    def exact(self, store: NodeId, exact: bool) -> None:
        self.exact_of[store] = exact


def located(number: int) -> Located:
    slot = SlotRef(NodeId("store"), 1, Tier.DRAM, 0, number, 1, number)
    return Located(BlockKey(number.to_bytes(16, "big")), slot, 0)


@pytest.mark.parametrize("loss", [0.0, 0.3])
async def test_a_follower_learns_all_over_a_real_bus(loss: float) -> None:
    async with cluster_of() as cluster:
        store = await cluster.node("store", Role.STORE)
        conductor = await cluster.node("conductor", Role.CONDUCTOR)
        truth = {copy.key: copy for copy in map(located, range(50))}
        seq = 0

        async def answer(incoming: Incoming) -> Message:
            pull = incoming.message
            assert isinstance(pull, SnapshotPull)
            keys = sorted(k for k in truth if pull.after is None or k > pull.after)
            chosen = keys[: pull.limit]
            return SnapshotPage(
                store=store.ref,
                seq=seq,
                located=tuple(truth[k] for k in chosen),
                next_key=chosen[-1] if len(keys) > len(chosen) else None,
            )

        await store.inbox(Role.STORE, Hop.QUERY, answer)
        sink = Sink()
        follower = BlockFollower(conductor, sink, FollowTimes(page_limit=20))
        await follower.start()
        cluster.network.faults = NetworkFaults(loss=loss)
        for number in range(50, 80):
            seq += 1
            copy = located(number)
            truth[copy.key] = copy
            gone = truth.pop(located(number - 50).key)
            change = BlocksChanged(
                store=store.ref,
                seq=seq,
                added=(copy,),
                dropped=(Dropped(gone.key, gone.slot.generation),),
            )
            await store.bus.publish(store.subjects.blocks(store.ref.node), change)
            store.report(StoreLoad(seq=seq))
            await cluster.run(0.1)
        cluster.network.faults = NetworkFaults()
        await until(cluster, lambda: follower.exact and sink.blocks == truth)
        assert sink.exact_of == {NodeId("store"): True}
        await store.close()
        await cluster.run(0.1)
        assert sink.blocks == {}
        await follower.close()


async def until(cluster: Cluster, condition: Callable[[], bool]) -> None:
    for _ in range(60):
        if condition():
            return
        await cluster.run(0.5)
    pytest.fail("not within 30 s")
