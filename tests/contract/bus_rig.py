"""Makes buses in memory or on a real server, and breaks the way to them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.integration.nats_server import NatsServer

from kvtide.bus import (
    BusLimits,
    Disconnected,
    Hop,
    Identity,
    Incoming,
    Later,
    LinkedBus,
    MemoryBus,
    MemoryHub,
    NatsBus,
    NoResponder,
)
from kvtide.bus.messages import (
    AnyMessage,
    Message,
    TokenAck,
)
from kvtide.kv import (
    BlockKey,
    NodeId,
    RequestId,
    Role,
)
from kvtide.runtime import SystemClock
from kvtide.transfer import MemoryFabric, TransferEndpoint

LIMITS = BusLimits(reconnect_wait_s=0.02, ping_s=0.2)
WAIT_S = 30.0


class Rig:
    """Makes buses on one hub or server, and breaks the way to it."""

    def __init__(self, server: NatsServer | None) -> None:
        self.server = server
        self.clock = SystemClock()
        self.hub = MemoryHub(self.clock)
        self.fabric = MemoryFabric(self.clock)
        self._stack = AsyncExitStack()
        self._nodes: list[NodeId] = []

    async def endpoint(self, node: str, epoch: int) -> TransferEndpoint:
        endpoint = self.fabric.endpoint(node=node, epoch=epoch)
        return await self._stack.enter_async_context(endpoint)

    async def bus(
        self,
        node: str,
        *,
        epoch: int = 1,
        limits: BusLimits = LIMITS,
        blobs: bool = True,
        cluster: str = "test",
    ) -> LinkedBus:
        identity = Identity(NodeId(node), epoch)
        endpoint = await self.endpoint(node, epoch) if blobs else None
        bus: LinkedBus
        if self.server is None:
            bus = MemoryBus(
                self.hub, identity, cluster=cluster, endpoint=endpoint, limits=limits
            )
        else:
            bus = await NatsBus.open(
                self.server.url,
                identity,
                cluster=cluster,
                clock=self.clock,
                endpoint=endpoint,
                limits=limits,
            )
        self._nodes.append(NodeId(node))
        return await self._stack.enter_async_context(bus)

    async def go_away(self) -> None:
        if self.server is None:
            for node in self._nodes:
                self.hub.disconnect(node)
        else:
            await asyncio.to_thread(self.server.kill)

    async def come_back(self) -> None:
        if self.server is None:
            for node in self._nodes:
                self.hub.reconnect(node)
        else:
            await asyncio.to_thread(self.server.start)

    async def close(self) -> None:
        await self._stack.aclose()
        await self.hub.close()


@asynccontextmanager
async def rig_on(server: NatsServer | None) -> AsyncGenerator[Rig]:
    rig = Rig(server)
    try:
        yield rig
    finally:
        await rig.close()


@dataclass
class Inbox:
    """A handler that keeps what it gets and answers with ``answer``."""

    answer: Callable[[Incoming], Message | Later | None] = lambda _: None
    got: list[Incoming] = field(default_factory=list[Incoming])
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    closed_gate: bool = False

    async def __call__(self, incoming: Incoming) -> Message | Later | None:
        self.got.append(incoming)
        if self.closed_gate:
            await self.gate.wait()
        return self.answer(incoming)

    @property
    def messages(self) -> list[AnyMessage]:
        return [incoming.message for incoming in self.got]


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within {WAIT_S} s: {what}")


async def retried(call: Callable[[], Awaitable[AnyMessage]]) -> AnyMessage:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except (Disconnected, NoResponder):
                await asyncio.sleep(0.01)


def counted(bus: LinkedBus, what: str, **labels: str) -> float:
    registry = bus.metrics.registry
    return registry.get_sample_value(f"kvtide_bus_{what}_total", labels) or 0.0


def ack(index: int) -> TokenAck:
    return TokenAck(request=RequestId("r-1"), attempt=1, choice=0, index=index)


def keys(count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(index.to_bytes(16, "big")) for index in range(count))


def pool_of(bus: LinkedBus, node: str) -> str:
    return bus.subjects.inbox(Role.STORE, NodeId(node), Hop.POOL)
