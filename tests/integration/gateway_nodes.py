"""Nodes on a bus in memory that is measured, for gateways among scripted workers."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from kvtide.bus import Identity, MemoryBus, MemoryHub, Node, NodeTimes
from kvtide.bus.network import Packet, PerfectNetwork
from kvtide.bus.roster import RosterTimes
from kvtide.kv import NodeId, Role
from kvtide.runtime import SystemClock
from kvtide.transfer import MemoryFabric

SECRET = b"s" * 32


class MeasuredNetwork(PerfectNetwork):
    """Notes how large the largest message on the bus was."""

    def __init__(self) -> None:
        self.largest_bytes = 0

    def plan(self, packet: Packet, now_s: float) -> tuple[float, ...]:
        self.largest_bytes = max(self.largest_bytes, packet.nbytes)
        return super().plan(packet, now_s)


@asynccontextmanager
async def open_memory_node(
    hub: MemoryHub,
    clock: SystemClock,
    role: Role,
    number: int = 1,
    fabric: MemoryFabric | None = None,
    dead_after_s: float = 3.0,
) -> AsyncGenerator[Node]:
    """A node on a bus in memory; with ``fabric``, what is too large goes as a blob."""
    identity = Identity(NodeId(f"{role}-{number}"), epoch=1)
    async with AsyncExitStack() as stack:
        endpoint = None
        if fabric is not None:
            endpoint = await stack.enter_async_context(
                fabric.endpoint(node=f"{role}-{number}", epoch=1)
            )
        bus = await stack.enter_async_context(
            MemoryBus(hub, identity, cluster="local", endpoint=endpoint)
        )
        node = Node(
            roles=(role,),
            bus=bus,
            identity=identity,
            clock=clock,
            secret=SECRET,
            endpoint=endpoint,
            times=NodeTimes(roster=RosterTimes(dead_after_s)),
        )
        yield await stack.enter_async_context(node)
