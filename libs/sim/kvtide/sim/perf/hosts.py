"""Nodes as the conductor sees them: beats, and the news of their stores."""

from kvtide.bus.messages import (
    Beat,
    DecodeLoad,
    Dropped,
    GatewayLoad,
    NodeState,
    PrefillLoad,
    StoreLoad,
)
from kvtide.conductor.events import BlocksMoved
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Role, SlotRef, Tier
from kvtide.sim.perf.pool import Change, Held, Store
from kvtide.sim.perf.shapes import ClusterShape

WORKER_CLASS = "simulated"


def key_of(block: int) -> BlockKey:
    """The key of a block of a workload, with the number in its bytes."""
    return BlockKey(block.to_bytes(16, "big"))


def block_of(key: BlockKey) -> int:
    """The block of a key."""
    return int.from_bytes(key, "big")


def asking(gateway: NodeRef) -> Beat:
    """The beat of a gateway that always has requests open."""
    return Beat(
        node=gateway,
        roles=(Role.GATEWAY,),
        seq=1,
        host="gateway",
        state=NodeState.READY,
        steps=0,
        load=(GatewayLoad(open_requests=1),),
    )


class Host:
    """A node's names, and its store if it has one."""

    def __init__(
        self, number: int, role: Role, shape: ClusterShape, store: Store | None
    ) -> None:
        """``number`` is the host's on the network."""
        self.number = number
        self.role = role
        self.store = store
        self.ref = NodeRef(NodeId(f"{role.value}-{number:04d}"), 1)
        self._facts = shape.facts
        self._block_bytes = shape.block_bytes
        self._beats = 0
        self._said: PrefillLoad | DecodeLoad | None = None

    def located(self, held: Held, *, ssd: bool) -> Located:
        """The descriptor of a copy here."""
        slot = SlotRef(
            node=self.ref.node,
            epoch=1,
            tier=Tier.SSD if ssd else Tier.DRAM,
            arena=0,
            offset=held.slot * self._block_bytes,
            length=self._block_bytes,
            generation=held.generation,
        )
        return Located(key_of(held.block), slot, held.block & 0xFFFFFFFF)

    def news(self, change: Change) -> BlocksMoved:
        """What a store gossips. A generation is told apart by its tier too."""
        return BlocksMoved(
            self.ref,
            [self.located(held, ssd=ssd) for held, ssd in change.added],
            [
                Dropped(key_of(held.block), held.generation)
                for held, _ in change.dropped
            ],
        )

    def beat(self, load: PrefillLoad | DecodeLoad) -> Beat | None:
        """A beat with this load; None if it says what the last one said."""
        if load == self._said:
            return None
        self._said = load
        self._beats += 1
        roles: tuple[Role, ...] = (self.role,)
        loads: tuple[PrefillLoad | DecodeLoad | StoreLoad, ...] = (load,)
        if self.store is not None:
            roles += (Role.STORE,)
            loads += (self._store_load(self.store),)
        return Beat(
            node=self.ref,
            roles=roles,
            seq=self._beats,
            host=f"host-{self.number:04d}",
            state=NodeState.READY,
            steps=0,
            load=loads,
            models=(self._facts,),
            worker_class=WORKER_CLASS,
        )

    def _store_load(self, store: Store) -> StoreLoad:
        used, total = len(store.dram), store.dram.limit
        return StoreLoad(
            total_slots=total,
            free_slots=total - used,
            used_slots=used,
            used_bytes=used * self._block_bytes,
            capacity_bytes=total * self._block_bytes,
            backed_bytes=used * self._block_bytes,
        )
