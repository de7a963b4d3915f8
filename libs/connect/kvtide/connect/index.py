"""Which blocks are where, as the gossip says: looked up without asking anybody."""

from collections.abc import Sequence

from kvtide.bus.messages import Dropped
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Tier

_Copies = dict[BlockKey, tuple[Located, ...]]


class BlockIndex:
    """A ``BlockSink`` that other threads may ask while the loop feeds it.

    Each question reads dictionaries whose values are never changed in place. It keeps at
    most ``limit`` blocks of all stores together and learns no more beyond: a block that
    is not known is a miss, nothing else.
    """

    def __init__(self, limit: int) -> None:
        """Nothing is known."""
        self._limit = limit
        self._stores: dict[NodeId, _Copies] = {}
        self._near: NodeId | None = None
        self.blocks = 0

    # ---- questions, from any thread

    def find(self, key: BlockKey) -> Located | None:
        """A copy: on this host before others, in DRAM before on SSD."""
        best: Located | None = None
        for store, copies in tuple(self._stores.items()):
            for copy in copies.get(key, ()):
                if best is None or self._cost(store, copy) < self._cost(
                    best.slot.node, best
                ):
                    best = copy
        return best

    def has(self, key: BlockKey) -> bool:
        """Whether any store has it."""
        return any(key in copies for copies in tuple(self._stores.values()))

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys`` from the first on are all there."""
        for count, key in enumerate(keys):
            if not self.has(key):
                return count
        return len(keys)

    # ---- what the follower says, in the loop

    def prefer(self, store: NodeId | None) -> None:
        """Copies of this store are the nearest."""
        self._near = store

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        """See ``BlockSink.apply``."""
        copies = self._stores.get(store.node)
        if copies is None:
            copies = {}
            self._stores = {**self._stores, store.node: copies}
        for gone in dropped:
            left = tuple(
                copy
                for copy in copies.get(gone.key, ())
                if copy.slot.generation != gone.generation
            )
            if left:
                copies[gone.key] = left
            elif copies.pop(gone.key, None) is not None:
                self.blocks -= 1
        for come in added:
            known = copies.get(come.key, ())
            if not known:
                if self.blocks >= self._limit:
                    continue
                self.blocks += 1
            others = tuple(each for each in known if each.slot.tier != come.slot.tier)
            copies[come.key] = (*others, come)

    def forget(self, store: NodeId) -> None:
        """See ``BlockSink.forget``."""
        gone = self._stores.get(store, {})
        self._stores = {
            name: copies for name, copies in self._stores.items() if name != store
        }
        self.blocks -= len(gone)

    def exact(self, store: NodeId, exact: bool) -> None:
        """What is not known is a miss, exact or not."""

    def _cost(self, store: NodeId, copy: Located) -> tuple[bool, bool]:
        return (copy.slot.tier is Tier.SSD, store != self._near)
