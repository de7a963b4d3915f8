"""The conductor's shell on the in-memory bus, with a network that loses and repeats."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry
from tests.integration.conductor_stand_ins import PretendedStore, until
from tests.unit.conductor_cluster import FACTS, admit, ended, keys

from kvtide.bus import (
    FaultyNetwork,
    Hop,
    Identity,
    MemoryBus,
    MemoryHub,
    NetworkFaults,
    Node,
)
from kvtide.bus.messages import (
    Admit,
    AnyMessage,
    DecodeLoad,
    Failure,
    Message,
    NodeState,
    Placed,
    PrefillLoad,
    StatusQuery,
    StatusReply,
)
from kvtide.catalog import Change, DecisionRow, NodeRow, RequestRow, Writer
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.shell import ConductorService
from kvtide.kv import NodeId, Role
from kvtide.runtime import SystemClock

CLOCK = SystemClock()


@dataclass
class KeptChanges:
    """A catalog that keeps what is written."""

    changes: list[Change] = field(default_factory=list[Change])

    async def migrate(self) -> None:
        """Nothing to do."""

    async def write(self, changes: Sequence[Change]) -> None:
        self.changes += changes


@dataclass
class Conductor:
    """One conductor of the test, with all that it was given."""

    node: Node
    service: ConductorService
    registry: CollectorRegistry
    kept: KeptChanges
    writer: Writer

    def count(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"kvtide_conductor_{name}", labels)
        return value or 0.0


@dataclass
class World:
    """A hub, its nodes, and the conductors among them."""

    hub: MemoryHub
    stack: AsyncExitStack

    async def node(self, name: str, role: Role) -> Node:
        identity = Identity(NodeId(name), epoch=1)
        bus = await self.stack.enter_async_context(MemoryBus(self.hub, identity))
        node = Node(
            roles=(role,), bus=bus, identity=identity, clock=CLOCK, secret=b"s" * 32
        )
        return await self.stack.enter_async_context(node)

    async def worker(self, name: str, role: Role) -> Node:
        node = await self.node(name, role)
        node.models(FACTS)
        loads = {
            Role.PREFILL: PrefillLoad(),
            Role.DECODE: DecodeLoad(kv_tokens_capacity=100_000),
        }
        node.report(loads[role])
        node.set_state(NodeState.READY)
        return node

    async def conductor(self, name: str) -> Conductor:
        node = await self.node(name, Role.CONDUCTOR)
        registry, kept = CollectorRegistry(), KeptChanges()
        writer = Writer(kept, clock=CLOCK)
        writer.start()
        self.stack.push_async_callback(writer.close)
        service = ConductorService(node, Dispatcher(node.ref), writer, registry)
        await service.start()
        self.stack.push_async_callback(service.close)
        return Conductor(node, service, registry, kept, writer)

    async def store(self, name: str) -> PretendedStore:
        store = PretendedStore(await self.node(name, Role.STORE))
        await store.start()
        return store


@asynccontextmanager
async def world(network: FaultyNetwork | None = None) -> AsyncGenerator[World]:
    hub = MemoryHub(CLOCK, network)
    try:
        async with AsyncExitStack() as stack:
            yield World(hub, stack)
    finally:
        await hub.close()


async def ask(us: Node, name: str, hop: Hop, question: Message) -> AnyMessage:
    inbox = us.subjects.inbox(Role.CONDUCTOR, NodeId(name), hop)
    return await us.bus.request(inbox, question, timeout_s=30)


async def status(us: Node, name: str) -> StatusReply:
    answer = await ask(us, name, Hop.QUERY, StatusQuery())
    assert isinstance(answer, StatusReply)
    return answer


async def placed(us: Node, name: str, question: Admit) -> Placed:
    answer = await ask(us, name, Hop.ADMIT, question)
    assert isinstance(answer, Placed), answer
    return answer


async def test_a_request_is_placed_booked_everywhere_ended_and_recorded() -> None:
    async with world() as made:
        one, other = await made.conductor("c1"), await made.conductor("c2")
        us = await made.node("g1", Role.GATEWAY)
        for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
            await made.worker(name, role)
        await until(lambda: len(one.node.roster.live()) == 5)
        await until(lambda: len(other.node.roster.live()) == 5)
        answer = await placed(us, "c1", admit())
        for name in ("c1", "c2"):
            assert (await status(us, name)).bookings == 1
        assert one.count("decisions_total", verdict="placed") == 1
        assert one.count("decision_seconds_count") == 1
        assert one.count("prompt_tokens_total", source="computed") == 1000
        await us.bus.publish(us.subjects.ended(us.ref.node), ended())
        for name in ("c1", "c2"):
            assert (await status(us, name)).bookings == 0
        assert one.count("ttft_error_ratio_count") == 1
        assert await one.writer.flushed(timeout_s=30)
        assert await other.writer.flushed(timeout_s=30)
        decisions = [c for c in one.kept.changes if isinstance(c, DecisionRow)]
        assert [row.reason for row in decisions] == [answer.reason]
        assert any(isinstance(c, RequestRow) for c in one.kept.changes)
        # each has recorded the nodes; only one of them the request
        rows = (DecisionRow, RequestRow)
        assert not any(isinstance(c, rows) for c in other.kept.changes)
        seen = {c.node for c in other.kept.changes if isinstance(c, NodeRow)}
        assert seen == {"c1", "c2", "g1", "p1", "d1"}


async def test_what_is_no_question_is_refused_and_the_next_one_answered() -> None:
    async with world() as made:
        await made.conductor("c1")
        us = await made.node("g1", Role.GATEWAY)
        answer = await ask(us, "c1", Hop.ADMIT, ended())
        assert isinstance(answer, Failure)
        assert answer.code == "unexpected"
        assert await status(us, "c1")


async def test_a_closed_conductor_says_that_it_drains() -> None:
    async with world() as made:
        one = await made.conductor("c1")
        us = await made.node("g1", Role.GATEWAY)
        await one.service.close()
        await one.service.close()

        def drains() -> bool:
            member = us.roster.get(NodeId("c1"))
            return member is not None and member.beat.state is NodeState.DRAINING

        await until(drains)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_both_indexes_are_the_truth_after_a_bad_network(seed: int) -> None:
    faults = NetworkFaults(loss=0.1, duplicate=0.1, delay_max_s=0.02, reorder=True)
    network = FaultyNetwork(seed, faults)
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    async with world(network) as made:
        one, other = await made.conductor("c1"), await made.conductor("c2")
        stores = [await made.store(name) for name in ("s1", "s2")]
        for number in range(40):
            store = chance.choice(stores)
            await store.add(keys(chance.randrange(1, 6), start=10 * number))
            if chance.random() < 0.4:
                known = sorted(store.copies)
                await store.drop(chance.sample(known, len(known) // 2))
            await asyncio.sleep(0.01)
        network.faults = NetworkFaults()  # healed
        expected = {store.ref.node: len(store.copies) for store in stores}
        us = await made.node("g1", Role.GATEWAY)
        for conductor in (one, other):
            name = conductor.node.ref.node

            async def settled(name: NodeId = name) -> bool:
                reply = await status(us, name)
                views = {view.beat.node.node: view.blocks for view in reply.nodes}
                found = {node: views.get(node) for node in expected}
                return reply.exact and found == expected

            async with asyncio.timeout(90):
                while not await settled():  # noqa: ASYNC110 - nobody could set an event
                    await asyncio.sleep(0.05)
