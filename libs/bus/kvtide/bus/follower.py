"""Follows which blocks lie where, at all stores, through lost and late messages."""

from collections.abc import Sequence
from typing import Protocol

from kvtide.bus.messages import Dropped
from kvtide.kv import Located, NodeId, NodeRef


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
