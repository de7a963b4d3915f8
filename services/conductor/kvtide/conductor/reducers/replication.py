"""Which blocks get copies at more stores, and which copies are of no use any more.

Three reasons. A placement that loads a much longer prefix from elsewhere than its host
has leaves a copy there (step 6 of the paper's Algorithm 1). A block that is placed more
often than its copies are worth gets one more. A store that has come fills up with what
is hottest. Orders are bounded in bytes a second, and in the share of a store that extra
copies take; what has gone cold is dropped again.

Each conductor orders for the placements that it makes; the first of them by name fills
new stores. A store takes an order given twice once.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.bus.messages import (
    Beat,
    DropExtras,
    NodeState,
    Placed,
    PlacementMade,
    ReplicaReason,
    Replicate,
    StoreLoad,
)
from kvtide.conductor.commands import TellStore
from kvtide.conductor.reducers.heat import Heat
from kvtide.conductor.reducers.membership import Membership
from kvtide.conductor.reducers.prefix_index import TIERS, PrefixIndex
from kvtide.conductor.reducers.store_lives import MAX_LIVES
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Role


@dataclass(frozen=True, slots=True)
class ReplicationRules:
    """When copies are made. Heat counts placements, halved each ``half_life_s``.

    A block gets one more copy when its heat is above ``hot`` for each copy that it has,
    up to ``copies``; an extra copy goes when the heat is below ``cold``.
    ``balancing_ratio``: how many times longer than its own a prefix loaded from
    elsewhere must be to be kept. ``extra_share``: of a store's memory. ``made``: extra
    copies of ours at one time.
    """

    enabled: bool = True
    half_life_s: float = 60.0
    hot: float = 4.0
    cold: float = 0.5
    copies: int = 4
    balancing_ratio: float = 2.0
    bytes_per_s: float = 128e6
    burst_s: float = 2.0
    extra_share: float = 0.25
    tracked: int = 50_000
    made: int = 50_000
    least_age_s: float = 30.0
    fill_s: float = 600.0
    fill_every_s: float = 2.0
    fill_heat: float = 1.5
    fill_batch: int = 128
    fill_below: float = 0.8
    swept: int = 500


@dataclass(slots=True)
class _Made:
    """A copy that we ordered."""

    bytes: int
    at_s: float


class Replication:
    """See the module."""

    def __init__(
        self, members: Membership, index: PrefixIndex, rules: ReplicationRules
    ) -> None:
        """``members`` and ``index`` are read only."""
        self._members = members
        self._index = index
        self._rules = rules
        self._heat = Heat(half_life_s=rules.half_life_s, tracked=rules.tracked)
        self._made: OrderedDict[tuple[NodeId, BlockKey], _Made] = OrderedDict()
        self._extra_bytes: dict[NodeId, int] = {}
        self._credit = rules.bytes_per_s * rules.burst_s
        self._credit_s: float | None = None
        self._joined: dict[NodeRef, float] = {}
        self._began_s: float | None = None
        self._fill_s = 0.0
        self._stays = np.zeros(MAX_LIVES + 1, dtype=bool)
        self._stays_version: tuple[int, int] | None = None

    # ---- events

    def heard(self, made: PlacementMade, now_s: float) -> None:
        """Another conductor placed a request: its blocks are wanted."""
        if not self._can_copy(made):
            return
        for key in made.keys:
            self._heat.add(key, now_s)

    def placed(
        self, made: PlacementMade, answer: Placed, now_s: float
    ) -> list[TellStore]:
        """We placed a request; the copies to make because of it."""
        if not self._can_copy(made):
            return []
        heats = {key: self._heat.add(key, now_s) for key in made.keys}
        if not self._rules.enabled or not heats:
            return []
        orders = self._kept_at_host(answer, now_s)
        ordered = {located.key for order in orders for located in _located(order)}
        hot = [
            key
            for key, heat in heats.items()
            if heat >= self._rules.hot and key not in ordered
        ]
        return orders + self._spread(hot, now_s)

    def store_seen(self, ref: NodeRef, now_s: float) -> None:
        """A store is there; one that was there when we began is not new."""
        if self._began_s is None:
            self._began_s = now_s
        if ref not in self._joined:
            new = now_s - self._began_s > self._rules.burst_s
            self._joined[ref] = now_s if new else -self._rules.fill_s

    def store_gone(self, ref: NodeRef) -> None:
        """A store's life is over, and the copies that it had."""
        self._joined.pop(ref, None)
        self._extra_bytes.pop(ref.node, None)
        for place in [place for place in self._made if place[0] == ref.node]:
            del self._made[place]

    def tick(self, me: NodeRef, now_s: float) -> list[TellStore]:
        """Time has passed: drop what is cold, fill who is new."""
        if not self._rules.enabled:
            return []
        return [*self._cold(now_s), *self._fill(me, now_s)]

    # ---- copies on placement

    def _kept_at_host(self, answer: Placed, now_s: float) -> list[TellStore]:
        """Step 6 of Algorithm 1: what was loaded from elsewhere stays at the host."""
        worker = answer.prefill if answer.prefill is not None else answer.decode
        beat = self._members.get(worker.node)
        store = None if beat is None else self._members.store_at(beat.host)
        if store is None:
            return []
        node = store.node.node
        own = 0
        while own < len(answer.reuse) and answer.reuse[own].slot.node == node:
            own += 1
        if len(answer.reuse) <= self._rules.balancing_ratio * own:
            return []
        remote = [each for each in answer.reuse if each.slot.node != node]
        which, lives = self._index.lives_of([each.key for each in remote])
        life = self._index.lives.of(node)
        held: set[int] = set()
        if life is not None:
            held.update(which[lives == life.number].tolist())
        lacking = [each for place, each in enumerate(remote) if place not in held]
        return self._order(store, lacking, ReplicaReason.PLACEMENT, now_s)

    # ---- copies by heat

    def _spread(self, hot: Sequence[BlockKey], now_s: float) -> list[TellStore]:
        """One more copy of each block that is too hot for those that it has.

        All of one placement go to one store, for a prefix with holes is of no use.
        """
        wanted: dict[BlockKey, tuple[Located, ...]] = {}
        for key, enough in zip(hot, self._holders(hot), strict=True):
            if not 0 < enough < self._rules.copies:
                continue
            if self._heat.of(key, now_s) >= self._rules.hot * enough:
                wanted[key] = self._copies(key)
        if not wanted:
            return []
        first = next(iter(wanted.values()))
        has = {copy.slot.node for copy in first}
        stores = [s for s in self._members.ready(Role.STORE) if s.node.node not in has]
        if not stores:
            return []
        store = max(stores, key=lambda beat: (_room_bytes(beat), beat.node.node))
        lacking = [
            copy
            for copies in wanted.values()
            if all(copy.slot.node != store.node.node for copy in copies)
            for copy in copies
        ]
        return self._order(store, lacking, ReplicaReason.HEAT, now_s)

    # ---- copies at a new store

    def _fill(self, me: NodeRef, now_s: float) -> list[TellStore]:
        if now_s < self._fill_s or not self._is_first(me):
            return []
        self._fill_s = now_s + self._rules.fill_every_s
        new = [
            beat for beat in self._members.ready(Role.STORE) if self._new(beat, now_s)
        ]
        if not new:
            return []
        rules = self._rules
        hottest = self._heat.hottest(4 * rules.fill_batch, now_s, rules.fill_heat)
        orders: list[TellStore] = []
        for store in new:
            node, lacking = store.node.node, list[Located]()
            for key in hottest:
                copies = self._copies(key)
                holders = {copy.slot.node for copy in copies}
                if copies and node not in holders and len(holders) < rules.copies:
                    lacking += copies
                if len(lacking) >= rules.fill_batch:
                    break
            orders += self._order(store, lacking, ReplicaReason.FILL, now_s)
        return orders

    def _is_first(self, me: NodeRef) -> bool:
        conductors = self._members.live(Role.CONDUCTOR)
        return all(me.node <= beat.node.node for beat in conductors)

    def _new(self, store: Beat, now_s: float) -> bool:
        joined_s = self._joined.get(store.node)
        load = _load(store)
        if joined_s is None or load is None:
            return False
        full = load.used_bytes > self._rules.fill_below * load.capacity_bytes
        return not full and now_s - joined_s < self._rules.fill_s

    # ---- what is cold

    def _cold(self, now_s: float) -> list[TellStore]:
        """Look at the copies made longest ago; keep those that are warm."""
        cold: dict[NodeId, list[BlockKey]] = {}
        for _ in range(min(self._rules.swept, len(self._made))):
            (node, key), made = next(iter(self._made.items()))
            if now_s - made.at_s < self._rules.least_age_s:
                break
            if self._heat.of(key, now_s) >= self._rules.cold:
                self._made.move_to_end((node, key))
                made.at_s = now_s
                continue
            self._forget(node, key)
            holders = {copy.slot.node for copy in self._copies(key)}
            # what has become the only copy is no extra one
            if node in holders and len(holders) > 1:
                cold.setdefault(node, []).append(key)
        return [
            TellStore(node, DropExtras(keys=tuple(keys))) for node, keys in cold.items()
        ]

    # ---- inside

    def _can_copy(self, made: PlacementMade) -> bool:
        """Whether blocks of its model can be read where they are."""
        line = self._members.line(made.model)
        return line is None or not line.facts.self_contained

    def _copies(self, key: BlockKey) -> tuple[Located, ...]:
        """The copies at stores that stay."""
        found = self._index.prefix((key,))
        members = self._members
        return tuple(
            copy
            for copies in found
            for copy in copies
            if (beat := members.get(copy.slot.node)) is not None
            and beat.state is NodeState.READY
        )

    def _holders(self, keys: Sequence[BlockKey]) -> list[int]:
        """At how many stores that stay each of these blocks is, exact for few copies."""
        if not keys:
            return []
        which, lives = self._index.lives_of(keys)
        stays = self._staying().take(lives)
        which, lives = which[stays], lives[stays]
        copies: list[int] = np.bincount(which, minlength=len(keys)).tolist()
        # a store may have a block in several tiers: so many copies are at enough stores
        many = len(TIERS) * self._rules.copies
        return [
            len(set(lives[which == at].tolist())) if 1 < count < many else count
            for at, count in enumerate(copies)
        ]

    def _staying(self) -> NDArray[np.bool_]:
        """Whether a life's number is that of a store that takes new work."""
        version = (self._index.lives.version, self._members.version)
        if version != self._stays_version:
            self._stays_version = version
            self._stays = np.zeros(MAX_LIVES + 1, dtype=bool)
            for life in self._index.lives.all():
                beat = self._members.get(life.ref.node)
                ready = beat is not None and beat.state is NodeState.READY
                self._stays[life.number] = ready
        return self._stays

    def _order(
        self,
        store: Beat,
        located: Sequence[Located],
        reason: ReplicaReason,
        now_s: float,
    ) -> list[TellStore]:
        """What of it the limits allow, in its order."""
        self._earn(now_s)
        node = store.node.node
        load = _load(store)
        most = int(self._rules.extra_share * load.capacity_bytes) if load else 0
        taken: list[Located] = []
        keys: set[BlockKey] = set()
        for each in located:
            if each.key in keys:
                taken.append(each)
                continue
            length = each.slot.length
            if (node, each.key) in self._made:
                continue
            # one that couldn't be remembered would never be undone
            full = len(self._made) >= self._rules.made
            extra = self._extra_bytes.get(node, 0) + length
            if full or self._credit < length or extra > most:
                break
            self._credit -= length
            self._remember(node, each.key, length, now_s)
            keys.add(each.key)
            taken.append(each)
        if not taken:
            return []
        return [TellStore(node, Replicate(reason=reason, located=tuple(taken)))]

    def _earn(self, now_s: float) -> None:
        rules = self._rules
        since_s = now_s if self._credit_s is None else self._credit_s
        earned = self._credit + (now_s - since_s) * rules.bytes_per_s
        self._credit = min(earned, rules.bytes_per_s * rules.burst_s)
        self._credit_s = now_s

    def _remember(self, node: NodeId, key: BlockKey, length: int, now_s: float) -> None:
        self._made[node, key] = _Made(length, now_s)
        self._extra_bytes[node] = self._extra_bytes.get(node, 0) + length

    def _forget(self, node: NodeId, key: BlockKey) -> None:
        made = self._made.pop((node, key))
        self._extra_bytes[node] = self._extra_bytes.get(node, 0) - made.bytes


def _located(order: TellStore) -> Iterator[Located]:
    if isinstance(order.message, Replicate):
        yield from order.message.located


def _load(store: Beat) -> StoreLoad | None:
    return next((load for load in store.load if isinstance(load, StoreLoad)), None)


def _room_bytes(store: Beat) -> int:
    load = _load(store)
    return 0 if load is None else load.capacity_bytes - load.used_bytes
