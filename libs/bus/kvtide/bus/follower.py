"""Follows which blocks lie where, at all stores, through lost and late messages."""

from collections.abc import Sequence
from typing import Protocol

import structlog

from kvtide.bus.errors import BusError
from kvtide.bus.following import (
    Apply,
    BlockFollowing,
    Exact,
    FollowCommand,
    FollowTimes,
    Forget,
    Pull,
)
from kvtide.bus.interface import Incoming, Subscription
from kvtide.bus.messages import (
    BlocksChanged,
    Dropped,
    SnapshotPage,
    SnapshotPull,
)
from kvtide.bus.node import Node
from kvtide.bus.roster import RosterEvent
from kvtide.bus.subjects import Hop
from kvtide.kv import Located, NodeId, NodeRef, Role
from kvtide.runtime import LimitError

log = structlog.get_logger("kvtide.bus.follower")

_TICK_S = 0.1
_PAGE_TIMEOUT_S = 5.0


class BlockSink(Protocol):
    """Keeps what a follower learns; called in the loop, must be quick."""

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        """These copies came and went; drops apply before adds.

        ``added`` may repeat what is known, a drop may name what is not.
        """
        ...

    def forget(self, store: NodeId) -> None:
        """Nothing is known of that store any more."""
        ...

    def exact(self, store: NodeId, exact: bool) -> None:
        """Whether what is known of that store is all there is."""
        ...


class BlockFollower:
    """The shell around ``BlockFollowing``: gossip and pages in, a sink fed.

    Ends with ``close``, or with its node.
    """

    def __init__(
        self, node: Node, sink: BlockSink, times: FollowTimes | None = None
    ) -> None:
        """Nothing happens before ``start``."""
        self._node = node
        self._sink = sink
        self._following = BlockFollowing(node.ref.node, times)
        self._subscription: Subscription | None = None
        self._closed = False

    @property
    def exact(self) -> bool:
        """Whether all that all live stores have is known, as far as one can tell."""
        return self._following.all_exact

    async def start(self) -> None:
        """Listen first, then learn who is there, then pull."""
        node = self._node
        self._subscription = await node.bus.subscribe(
            node.subjects.all_blocks(), self._on_gossip, on_lost=self._on_lost
        )
        node.on_member(self._on_member)
        node.tasks.spawn(self._tick(), name="block follower")

    async def close(self) -> None:
        """Feed the sink no more. Idempotent."""
        self._closed = True
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.close()

    async def _on_gossip(self, incoming: Incoming) -> None:
        if isinstance(incoming.message, BlocksChanged):
            now_s = self._node.clock.monotonic()
            self._do(self._following.changed(incoming.message, now_s))

    def _on_member(self, event: RosterEvent) -> None:
        self._do(self._following.member(event, self._node.clock.monotonic()))

    def _on_lost(self, count: int) -> None:
        log.info("block gossip lost", count=count)
        self._following.lost(self._node.clock.monotonic())

    async def _tick(self) -> None:
        while not self._closed:
            await self._node.clock.sleep(_TICK_S)
            self._do(self._following.tick(self._node.clock.monotonic()))

    async def _pull(self, pull: Pull) -> None:
        node = self._node
        subject = node.subjects.inbox(Role.STORE, pull.store.node, Hop.QUERY)
        question = SnapshotPull(after=pull.after, limit=pull.limit)
        try:
            answer = await node.bus.request(
                subject, question, timeout_s=_PAGE_TIMEOUT_S
            )
        except (BusError, LimitError) as error:
            log.info("no snapshot page", store=pull.store.node, error=str(error))
            answer = None
        now_s = node.clock.monotonic()
        if isinstance(answer, SnapshotPage):
            self._do(self._following.page(pull.number, answer, now_s))
        else:
            self._do(self._following.failed(pull.number, now_s))

    def _do(self, commands: list[FollowCommand]) -> None:
        if self._closed:
            return
        for command in commands:
            match command:
                case Apply(store, added, dropped):
                    self._sink.apply(store, added, dropped)
                case Forget(store):
                    self._sink.forget(store)
                case Exact(store, exact):
                    self._sink.exact(store, exact)
                case Pull():
                    name = f"snapshot of {command.store.node}"
                    self._node.tasks.spawn(self._pull(command), name=name)
