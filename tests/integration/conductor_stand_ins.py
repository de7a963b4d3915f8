"""A store and workers that only say what real ones would, on a real bus."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tests.unit.conductor_cluster import FACTS, located

from kvtide.bus import Hop, Identity, Incoming, NatsBus, Node
from kvtide.bus.messages import (
    BlocksChanged,
    DecodeLoad,
    Dropped,
    Message,
    NodeState,
    PrefillLoad,
    SnapshotPage,
    SnapshotPull,
    StoreLoad,
)
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Role
from kvtide.runtime import SystemClock

SECRET = b"s" * 32
CLOCK = SystemClock()


@asynccontextmanager
async def node_on(
    nats: str, name: str, role: Role, *, epoch: int = 1
) -> AsyncGenerator[Node]:
    """A node with a connection of its own."""
    identity = Identity(NodeId(name), epoch=epoch)
    async with (
        await NatsBus.open(nats, identity, clock=CLOCK) as bus,
        Node(
            roles=(role,), bus=bus, identity=identity, clock=CLOCK, secret=SECRET
        ) as node,
    ):
        yield node


@asynccontextmanager
async def workers_on(nats: str) -> AsyncGenerator[dict[str, Node]]:
    """Two prefill and two decode workers, ready, that never do anything."""
    async with AsyncExitStack() as stack:
        nodes: dict[str, Node] = {}
        for name, role in (
            ("p1", Role.PREFILL),
            ("p2", Role.PREFILL),
            ("d1", Role.DECODE),
            ("d2", Role.DECODE),
        ):
            node = await stack.enter_async_context(node_on(nats, name, role))
            node.models(FACTS)
            if role is Role.PREFILL:
                node.report(PrefillLoad())
            else:
                node.report(DecodeLoad(kv_tokens_capacity=100_000))
            node.set_state(NodeState.READY)
            nodes[name] = node
        yield nodes


class PretendedStore:
    """Has blocks, gossips changes, answers pulls; keeps no bytes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.copies: dict[BlockKey, Located] = {}
        self.seq = 0
        self.pulls = 0

    @property
    def ref(self) -> NodeRef:
        return self.node.ref

    async def start(self) -> None:
        await self.node.inbox(Role.STORE, Hop.QUERY, self._on_pull)
        self._report()
        self.node.set_state(NodeState.READY)

    async def add(self, keys: Sequence[BlockKey], *, said: bool = True) -> None:
        """Store copies; ``said`` False: the gossip about them is lost."""
        added = [located(key, self.ref, generation=self.seq + 1) for key in keys]
        self.copies.update({copy.key: copy for copy in added})
        await self._change(added, [], said=said)

    async def drop(self, keys: Sequence[BlockKey]) -> None:
        dropped = [Dropped(key, self.copies.pop(key).slot.generation) for key in keys]
        await self._change([], dropped)

    async def _change(
        self, added: list[Located], dropped: list[Dropped], *, said: bool = True
    ) -> None:
        self.seq += 1
        if said:
            changed = BlocksChanged(
                store=self.ref,
                seq=self.seq,
                added=tuple(added),
                dropped=tuple(dropped),
            )
            subject = self.node.subjects.blocks(self.ref.node)
            await self.node.bus.publish(subject, changed)
        self._report()

    def _report(self) -> None:
        self.node.report(StoreLoad(seq=self.seq, used_slots=len(self.copies)))

    async def _on_pull(self, incoming: Incoming) -> Message | None:
        pull = incoming.message
        if not isinstance(pull, SnapshotPull):
            return None
        self.pulls += 1
        later = sorted(
            key for key in self.copies if pull.after is None or key > pull.after
        )
        page = later[: pull.limit]
        return SnapshotPage(
            store=self.ref,
            seq=self.seq,
            located=tuple(self.copies[key] for key in page),
            next_key=page[-1] if len(later) > len(page) else None,
        )


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait for a condition of this process."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(0.02)
