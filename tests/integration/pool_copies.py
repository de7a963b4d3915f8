"""What a follower hears of every store's copies, apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.bus.messages import Dropped
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Tier

Found = dict[tuple[BlockKey, Tier], Located]


@dataclass
class Copies:
    """A ``BlockSink``: gossip replayed, by store, key and tier."""

    stores: dict[NodeId, Found] = field(default_factory=dict[NodeId, Found])
    known: set[NodeId] = field(default_factory=set[NodeId])

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        found = self.stores.setdefault(store.node, {})
        for gone in dropped:
            for tier in Tier:
                copy = found.get((gone.key, tier))
                if copy is not None and copy.slot.generation == gone.generation:
                    del found[gone.key, tier]
        for come in added:
            found[come.key, come.slot.tier] = come

    def forget(self, store: NodeId) -> None:
        self.stores.pop(store, None)

    def exact(self, store: NodeId, exact: bool) -> None:
        if exact:
            self.known.add(store)
        else:
            self.known.discard(store)

    def at(self, store: str) -> dict[BlockKey, Located]:
        """The copies at one store; of a key in two tiers the faster one."""
        found = self.stores.get(NodeId(store), {})
        order = sorted(found.values(), key=lambda copy: copy.slot.tier == Tier.DRAM)
        return {copy.key: copy for copy in order}

    def located(self, store: str, keys: Sequence[BlockKey]) -> list[Located]:
        found = self.at(store)
        return [found[key] for key in keys]
