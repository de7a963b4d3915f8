"""What the pool holds, published as KV events for routers in front of this gateway.

The gateway has the tokens: of prompts as they come, of answers as they are drawn. The
stores' gossip says what is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.bus import BlockFollower, Node
from kvtide.bus.messages import Dropped, RequestEnded, Tokens
from kvtide.connect.kv_events import KvEvent
from kvtide.connect.kv_publisher import KvPublisher
from kvtide.connect.pool_events import PoolEvents
from kvtide.gateway.life import Event, PullAnswered, RequestSpec, WorkerSaid
from kvtide.gateway.observing import Observer
from kvtide.kv import KeySpace, Located, NodeId, NodeRef, RequestId, TenantId


@dataclass(slots=True)
class _Open:
    space: KeySpace
    spec: RequestSpec
    answer: list[int]


class PoolFeed(Observer):
    """A ``kvtide.bus.BlockSink`` too. ``start``, then ``run`` in a task, then ``close``."""

    def __init__(self, node: Node, publisher: KvPublisher, tenant: TenantId) -> None:
        """``tenant``'s blocks are told of without a salt, those of others with one."""
        self._publisher = publisher
        self._tenant = tenant
        self._events = PoolEvents()
        self._open: dict[RequestId, _Open] = {}
        self._follower = BlockFollower(node, self)

    async def start(self) -> None:
        """Bind, and learn what is there.

        Raises:
            ConfigError: an address can't be bound.
        """
        self._publisher.open()
        await self._follower.start()

    async def run(self) -> None:
        """Publish until cancelled."""
        await self._publisher.run()

    async def close(self) -> None:
        """Listen and publish no more."""
        await self._follower.close()
        self._publisher.close()

    # ---- the observer

    def arrived(self, spec: RequestSpec, space: KeySpace) -> None:
        """See ``Observer``; blocks that depend on pictures are in no event."""
        if not spec.pictures:
            self._open[spec.request] = _Open(space, spec, [])

    def told(self, request: RequestId, event: Event) -> None:
        """See ``Observer``."""
        match event:
            case WorkerSaid(_, Tokens() as said):
                index, ids = said.index, said.ids
            case PullAnswered(_, page):
                index, ids = page.index, page.ids
            case _:
                return
        known = self._open.get(request)
        if known is not None and index <= len(known.answer):
            known.answer += ids[len(known.answer) - index :]

    def ended(self, record: RequestEnded) -> None:
        """See ``Observer``."""
        known = self._open.pop(record.request, None)
        if known is None:
            return
        spec = known.spec
        tokens = (*spec.prompt, *known.answer)
        salt = self._salt(spec.tenant, known.space.space.salt)
        self._post(self._events.learn(known.space, tokens, spec.keys, salt))

    def _salt(self, tenant: TenantId, salt: str) -> str:
        """What tells a space from that of requests without a key and a salt."""
        if tenant == self._tenant and not salt:
            return ""
        return f"{tenant}/{salt}" if salt else tenant

    # ---- the sink

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        """See ``BlockSink``."""
        self._post(self._events.apply(store, added, dropped))

    def forget(self, store: NodeId) -> None:
        """See ``BlockSink``."""
        self._post(self._events.forget(store))

    def exact(self, store: NodeId, exact: bool) -> None:
        """See ``BlockSink``; what isn't exact is told all the same."""

    def _post(self, events: Sequence[KvEvent]) -> None:
        self._publisher.post(events)
