"""Feeds the dispatcher with what a block follower learns."""

from collections.abc import Sequence

from kvtide.bus.messages import Dropped
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import BlocksMoved, StoreExact, StoreForgotten
from kvtide.kv import Located, NodeId, NodeRef
from kvtide.runtime import Clock


class IndexSink:
    """A ``kvtide.bus.BlockSink``."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        """Both belong to the caller."""
        self._dispatcher = dispatcher
        self._clock = clock

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        """See ``BlockSink.apply``."""
        event = BlocksMoved(store, added, dropped)
        self._dispatcher.handle(event, self._clock.monotonic())

    def forget(self, store: NodeId) -> None:
        """See ``BlockSink.forget``."""
        self._dispatcher.handle(StoreForgotten(store), self._clock.monotonic())

    def exact(self, store: NodeId, exact: bool) -> None:
        """See ``BlockSink.exact``."""
        event = StoreExact(store, exact)
        self._dispatcher.handle(event, self._clock.monotonic())
