"""What a store that leaves must move first, and whom it asks to take it. Pure.

Gossip of the others says which of the blocks here are elsewhere too. Copies at stores
that leave themselves do not count. A block is moved once another store has told of it;
an order that brings nothing in time is given to another store, and one that took
nothing of an order counts as full for a while.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtide.bus.messages import DrainPhase, DrainState, Dropped
from kvtide.kv import BlockKey, Located, NodeId, NodeRef


@dataclass(frozen=True, slots=True)
class DrainRules:
    """Seconds and counts. A store has at most ``asked`` blocks of ours to fetch.

    ``skipped``: how many blocks that fit nowhere are passed over to find smaller ones.
    """

    asked: int = 256
    skipped: int = 1000
    keep_batch: int = 1000
    order_s: float = 4.0
    full_s: float = 3.0
    lease_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A store that may take blocks: it is ready and has room for so many bytes."""

    ref: NodeRef
    room_bytes: int


@dataclass(frozen=True, slots=True)
class Order:
    """Ask ``store`` to copy these, or to keep the copies that it has."""

    store: NodeId
    keys: tuple[BlockKey, ...]


@dataclass(slots=True)
class _Asked:
    """What one store was asked for, and since when nothing has come of it.

    ``took``: something has since the last tick.
    """

    since_s: float
    took: bool = False
    bytes: int = 0
    keys: set[BlockKey] = field(default_factory=set[BlockKey])


Generations = dict[BlockKey, set[int]]


class Drain:
    """See the module. A ``BlockSink`` of what other stores tell."""

    def __init__(
        self, me: NodeId, *, force: bool, rules: DrainRules | None = None
    ) -> None:
        """``force``: leave without what nobody has room for."""
        self.force = force
        self.phase = DrainPhase.LOOKING
        self.reason = ""
        self._me = me
        self._rules = rules or DrainRules()
        self._mine: dict[BlockKey, int] = {}
        self._elsewhere: dict[NodeId, Generations] = {}
        self._leaving: set[NodeId] = set()
        self._copies: dict[BlockKey, int] = {}
        self._left: OrderedDict[BlockKey, None] = OrderedDict()
        self._left_bytes = 0
        self._asked: dict[NodeId, _Asked] = {}
        self._asked_of: dict[BlockKey, NodeId] = {}
        self._full: dict[NodeId, float] = {}
        self._finishing_s: float | None = None
        self._first_left: dict[BlockKey, None] | None = None
        self._moved = 0
        self._moved_bytes = 0

    # ---- what is here

    def own(self, blocks: Mapping[BlockKey, int]) -> None:
        """All blocks that are here, with their bytes: the start, or a new look."""
        self._mine = dict(blocks)
        self._elsewhere = {}
        self._copies = {}
        self._left = OrderedDict.fromkeys(self._mine)
        self._left_bytes = sum(self._mine.values())
        self._asked, self._asked_of = {}, {}
        self._first_left = None
        self.phase = DrainPhase.LOOKING

    def lost(self, keys: Iterable[BlockKey]) -> None:
        """These are here no more: nothing is to be moved of them."""
        for key in keys:
            if key in self._mine:
                self._unask(key)
                self._unleave(key)
                del self._mine[key]

    def unknown(self, keys: Iterable[BlockKey]) -> bool:
        """Whether any of these came after the last look."""
        return any(key not in self._mine for key in keys)

    # ---- what others tell

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        """See ``BlockSink.apply``."""
        if store.node == self._me:
            return
        known = self._elsewhere.setdefault(store.node, {})
        counts = store.node not in self._leaving
        for gone in dropped:
            generations = known.get(gone.key)
            if generations is None:
                continue
            generations.discard(gone.generation)
            if not generations:
                del known[gone.key]
                if counts:
                    self._count(gone.key, -1)
        for come in added:
            if come.key not in self._mine:
                continue
            if come.key not in known:
                known[come.key] = set()
                if counts:
                    self._count(come.key, 1)
            known[come.key].add(come.slot.generation)

    def forget(self, store: NodeId) -> None:
        """See ``BlockSink.forget``."""
        known = self._elsewhere.pop(store, {})
        if store not in self._leaving:
            for key in known:
                self._count(key, -1)

    def exact(self, store: NodeId, exact: bool) -> None:
        """See ``BlockSink.exact``."""

    def leaving(self, stores: Iterable[NodeId]) -> None:
        """Stores that leave too: what only they have besides is to be moved."""
        now = set(stores)
        for store in now - self._leaving:
            for key in self._elsewhere.get(store, {}):
                self._count(key, -1)
        for store in self._leaving - now:
            for key in self._elsewhere.get(store, {}):
                self._count(key, 1)
        self._leaving = now

    # ---- what to do

    def looked(self) -> list[Order]:
        """All that the others have is known: have them keep what is here too."""
        if self.phase is not DrainPhase.LOOKING:
            return []
        self.phase = DrainPhase.MOVING
        self._first_left = dict(self._left)
        kept: set[BlockKey] = set()
        orders: list[Order] = []
        for store, known in self._elsewhere.items():
            if store in self._leaving:
                continue
            keys = [key for key in known if key not in kept]
            kept.update(keys)
            size = self._rules.keep_batch
            orders += [
                Order(store, tuple(keys[at : at + size]))
                for at in range(0, len(keys), size)
            ]
        return orders

    def tick(self, peers: Sequence[Peer], leases: int, now_s: float) -> list[Order]:
        """Time has passed: whom to ask for what, and whether it is over."""
        if self.phase in (DrainPhase.LOOKING, DrainPhase.LEAVING):
            return []
        self._give_up({peer.ref.node for peer in peers}, now_s)
        orders = self._orders(peers, now_s)
        if self._left:
            self._finishing_s = None
            self.phase = DrainPhase.MOVING if self._asked_of else DrainPhase.NO_ROOM
            if self._asked_of:
                self.reason = ""
            elif not self.force:
                self.reason = self._no_room(peers)
        if not self._left or (self.force and not self._asked_of):
            self._finish(leases, now_s)
        return orders

    def _finish(self, leases: int, now_s: float) -> None:
        if self._finishing_s is None:
            self._finishing_s = now_s
        waited = now_s - self._finishing_s >= self._rules.lease_s
        if leases == 0 or waited:
            self.phase = DrainPhase.LEAVING
            self.reason = f"leaves {len(self._left)} blocks behind" * bool(self._left)
        else:
            self.phase = DrainPhase.FINISHING
            self.reason = f"{leases} leases of running requests are held"

    def state(self, leases: int) -> DrainState:
        """The progress."""
        return DrainState(
            phase=self.phase,
            blocks=len(self._mine),
            left=len(self._left),
            left_bytes=self._left_bytes,
            moved=self._moved,
            moved_bytes=self._moved_bytes,
            leases=leases,
            reason=self.reason,
        )

    # ---- inside

    def _count(self, key: BlockKey, change: int) -> None:
        """One store more or less, of those that stay, has this block."""
        copies = self._copies.get(key, 0) + change
        if copies:
            self._copies[key] = copies
        else:
            self._copies.pop(key, None)
        if key not in self._mine:
            return
        if copies and key in self._left:
            asked = self._asked.get(self._asked_of.get(key, self._me))
            if asked is not None:
                asked.took = True
            self._unask(key)
            self._unleave(key)
            if self._first_left is not None and key in self._first_left:
                del self._first_left[key]
                self._moved += 1
                self._moved_bytes += self._mine[key]
        elif not copies and key not in self._left:
            self._left[key] = None
            self._left_bytes += self._mine[key]
            if self._first_left is not None:
                self._first_left[key] = None

    def _unleave(self, key: BlockKey) -> None:
        if key in self._left:
            del self._left[key]
            self._left_bytes -= self._mine[key]

    def _unask(self, key: BlockKey) -> None:
        store = self._asked_of.pop(key, None)
        if store is None:
            return
        asked = self._asked[store]
        asked.keys.discard(key)
        asked.bytes -= self._mine[key]

    def _give_up(self, there: set[NodeId], now_s: float) -> None:
        """Take back what was asked of stores that are gone or take nothing."""
        for store, asked in list(self._asked.items()):
            if asked.took:
                asked.since_s, asked.took = now_s, False
            late = now_s - asked.since_s >= self._rules.order_s
            if asked.keys and store in there and not late:
                continue
            if asked.keys and late:
                self._full[store] = now_s + self._rules.full_s
            for key in list(asked.keys):
                self._unask(key)
                self._left.move_to_end(key, last=False)
            del self._asked[store]
        self._full = {
            node: end_s for node, end_s in self._full.items() if end_s > now_s
        }

    def _orders(self, peers: Sequence[Peer], now_s: float) -> list[Order]:
        """Give each block to the store that has most room for it."""
        rooms = {
            peer.ref.node: peer.room_bytes - self._asked_bytes(peer.ref.node)
            for peer in peers
            if peer.ref.node not in self._full and self._free(peer.ref.node) > 0
        }
        chosen: dict[NodeId, list[BlockKey]] = {}
        too_large = 0
        # those that were asked for stand behind those that were not
        for key in self._left:
            if not rooms or key in self._asked_of or too_large >= self._rules.skipped:
                break
            length = self._mine[key]
            store = max(rooms, key=lambda node: (rooms[node], node))
            if rooms[store] < length:
                too_large += 1
                continue
            rooms[store] -= length
            self._ask(store, key, length, now_s)
            chosen.setdefault(store, []).append(key)
            if self._free(store) == 0:
                del rooms[store]
        orders = [Order(store, tuple(keys)) for store, keys in chosen.items()]
        for order in orders:
            for key in order.keys:
                self._left.move_to_end(key)
        return orders

    def _ask(self, store: NodeId, key: BlockKey, length: int, now_s: float) -> None:
        asked = self._asked.setdefault(store, _Asked(now_s))
        asked.keys.add(key)
        asked.bytes += length
        self._asked_of[key] = store

    def _asked_bytes(self, store: NodeId) -> int:
        asked = self._asked.get(store)
        return 0 if asked is None else asked.bytes

    def _free(self, store: NodeId) -> int:
        asked = self._asked.get(store)
        return self._rules.asked - (0 if asked is None else len(asked.keys))

    def _no_room(self, peers: Sequence[Peer]) -> str:
        there = "no other store is ready" if not peers else "no other store has room"
        return (
            f"{there} for {len(self._left)} blocks ({self._left_bytes} bytes) that only "
            "this one has: add a store or memory, or leave them behind with --force"
        )
