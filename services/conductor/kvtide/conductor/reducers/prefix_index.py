"""Which copy of which block is where, in columns (see ``key_table``, ``copy_table``).

A store's life is a small number in its copies. To forget a store is to retire its number,
whatever it held; ``sweep`` then clears what carries retired numbers, a bounded piece at a
time, and the number is used again only after a whole round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.bus.messages import Dropped
from kvtide.conductor.reducers.copy_table import CopyFields, CopyTable
from kvtide.conductor.reducers.key_table import EMPTY, KeyTable, Rows
from kvtide.conductor.reducers.store_lives import StoreLife, StoreLives
from kvtide.kv import KEY_BYTES, BlockKey, Located, NodeId, NodeRef, SlotRef, Tier

TIERS: tuple[Tier, ...] = tuple(Tier)
"""A tier's number is its position here."""

_TIER_NUMBER = {tier: number for number, tier in enumerate(TIERS)}
_FEW = 64
"""Up to so many keys are looked up one by one, ending at the first that is missing."""


@dataclass(frozen=True, slots=True)
class Found:
    """Copies of a prefix of ``blocks`` blocks, by block; true until the next change.

    Columns of one length: the block's position, the life number of the copy's store,
    its tier's number, and the copy's place in the index. Copies at stores that are no
    longer known are not among them, so a block may have none.
    """

    blocks: int
    block: NDArray[np.int64]
    life: NDArray[np.uint16]
    tier: NDArray[np.uint8]
    place: NDArray[np.int64]


class PrefixIndex:
    """Copies by key, of stores that are not forgotten. Applying twice changes nothing."""

    def __init__(self) -> None:
        """Start empty."""
        self._keys = KeyTable()
        self._copies = CopyTable()
        self.lives = StoreLives()
        self._exact: set[NodeId] = set()
        self._exact_changes = 0
        self._sweeping: set[int] = set()
        self._swept_to = 0

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a store comes or goes, or gets known exactly or not."""
        return self.lives.version, self._exact_changes

    @property
    def blocks(self) -> int:
        """Keys in the index; those of forgotten stores count until they are swept."""
        return len(self._keys)

    @property
    def copies(self) -> int:
        """Copies at stores that are not forgotten."""
        return sum(life.copies for life in self.lives.all())

    def is_exact(self, store: NodeId) -> bool:
        """Whether this store's blocks are known completely."""
        return store in self._exact

    def copies_at(self, store: NodeId) -> int:
        """Copies at one store."""
        life = self.lives.of(store)
        return life.copies if life is not None else 0

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        """Take changes of one life of a store, drops first; of an older life: nothing."""
        life = self.lives.open(store)
        if life is None:
            return
        life.warm = False
        for drop in dropped:
            self._drop(life, drop)
        node, epoch = store.node, store.epoch
        for located in added:
            slot = located.slot
            if slot.node == node and slot.epoch == epoch:
                self._add(life, located)

    def warm(self, store: NodeRef, located: Sequence[Located]) -> bool:
        """Take what a catalog says that a store holds, until the store itself speaks.

        False, and nothing happens, once anything was heard of it from itself.
        """
        known = self.lives.of(store.node)
        if store.node in self._exact or (known is not None and not known.warm):
            return False
        life = self.lives.open(store)
        if life is None:
            return False
        life.warm = True
        for copy in located:
            if copy.slot.owner == store:
                self._add(life, copy)
        return True

    def forget(self, store: NodeId) -> None:
        """Nothing is known of this store any more."""
        self._exact.discard(store)
        self.lives.close(store)

    def forget_life(self, ref: NodeRef) -> None:
        """This life of a store is over. What a later one said already stays."""
        life = self.lives.of(ref.node)
        if life is not None and life.ref.epoch <= ref.epoch:
            self.forget(ref.node)

    def set_exact(self, store: NodeId, *, exact: bool) -> None:
        """Say whether a store's blocks are known completely."""
        self._exact_changes += exact != (store in self._exact)
        if exact:
            self._exact.add(store)
        else:
            # nothing is kept of a store that is gone
            self._exact.discard(store)

    def find(self, keys: Sequence[BlockKey]) -> Found:
        """The copies of the first keys, up to the first one that isn't in the index."""
        rows = self._rows(keys)
        which, places = self._copies.places(rows)
        lives, tiers = self._copies.lives_and_tiers(places)
        if self.lives.retired or self._sweeping:
            live = self.lives.known[lives]
            which, places = which[live], places[live]
            lives, tiers = lives[live], tiers[live]
        return Found(len(rows), which, lives, tiers, places)

    def lives_of(
        self, keys: Sequence[BlockKey]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """The copies of any keys, those that are missing left out: whose, and at which life.

        Copies at stores that are no longer known may be among them.
        """
        rows = np.array([self._keys.find(key) for key in keys], dtype=np.int32)
        there = np.flatnonzero(rows != EMPTY)
        which, places = self._copies.places(rows[there])
        lives, _ = self._copies.lives_and_tiers(places)
        return there[which], lives

    def located(self, key: BlockKey, place: int) -> Located:
        """The copy of ``key`` in a place that ``find`` gave, before any change.

        Raises:
            KeyError: its store is forgotten.
        """
        copy = self._copies.at(place)
        life = self.lives.numbered(copy.life)
        if life is None:
            raise KeyError(key)
        slot = SlotRef(
            node=life.ref.node,
            epoch=life.ref.epoch,
            tier=TIERS[copy.tier],
            arena=copy.arena,
            offset=copy.offset,
            length=copy.length,
            generation=copy.generation,
        )
        return Located(key, slot, copy.header_xxh3)

    def prefix(self, keys: Sequence[BlockKey]) -> list[tuple[Located, ...]]:
        """The copies of the first keys, up to the first one that has none."""
        found = self.find(keys)
        blocks: list[list[Located]] = [[] for _ in range(found.blocks)]
        for which, place in zip(found.block, found.place, strict=True):
            block = int(which)
            blocks[block].append(self.located(keys[block], int(place)))
        whole = next((n for n, copies in enumerate(blocks) if not copies), len(blocks))
        return [tuple(copies) for copies in blocks[:whole]]

    def sweep(self, limit: int) -> None:
        """Clear up to ``limit`` keys of copies at forgotten stores."""
        if self._swept_to >= self._keys.rows:
            self.lives.reuse(self._sweeping)
            self._sweeping, self.lives.retired = self.lives.retired, set()
            self._swept_to = 0
        if not self._sweeping:
            self._swept_to = self._keys.rows
            return
        end = min(self._swept_to + limit, self._keys.rows)
        self._clear(np.arange(self._swept_to, end, dtype=np.int32))
        self._swept_to = end

    def _rows(self, keys: Sequence[BlockKey]) -> Rows:
        if len(keys) <= _FEW:
            return np.array(self._keys.find_first(keys), dtype=np.int32)
        sound = next((n for n, k in enumerate(keys) if len(k) != KEY_BYTES), len(keys))
        found = self._keys.find_all(keys[:sound])
        missing = np.flatnonzero(found == EMPTY)
        return found[: missing[0]] if missing.size else found

    def _add(self, life: StoreLife, located: Located) -> None:
        """A store has at most one copy of a key in a tier: the newest replaces it."""
        slot = located.slot
        copy = CopyFields(
            life.number,
            _TIER_NUMBER[slot.tier],
            slot.arena,
            slot.offset,
            slot.length,
            slot.generation,
            located.header_xxh3,
        )
        if len(located.key) != KEY_BYTES:
            return
        known = self._keys.rows
        row = self._keys.add(located.key)
        try:
            place = self._place(row, copy) if row < known else None
            if place is None:
                self._copies.append(row, copy)
                life.copies += 1
            else:
                self._copies.replace(place, copy)
        except OverflowError:
            # no store has such a slot
            if not self._copies.run(row):
                self._keys.remove(row)

    def _place(self, row: int, copy: CopyFields) -> int | None:
        lives, tiers = self._copies.life, self._copies.tier
        for place in self._copies.run(row):
            if lives[place] == copy.life and tiers[place] == copy.tier:
                return place
        return None

    def _drop(self, life: StoreLife, drop: Dropped) -> None:
        row = self._keys.find(drop.key)
        if row == EMPTY:
            return
        copies = self._copies
        for place in reversed(copies.run(row)):
            if copies.life[place] != life.number:
                continue
            if copies.generation[place] == drop.generation:
                life.copies -= 1
                self._remove(row, place)

    def _clear(self, rows: Rows) -> None:
        held = rows[self._copies.held(rows)]
        which, places = self._copies.places(held)
        lives, _ = self._copies.lives_and_tiers(places)
        stale = np.zeros(len(self.lives.known), dtype=bool)
        stale[list(self._sweeping)] = True
        bad = stale[lives]
        # from the back, for what is last in a run takes the place of what goes
        pairs = zip(held[which[bad]].tolist(), places[bad].tolist(), strict=True)
        for row, place in reversed(list(pairs)):
            self._remove(row, place)

    def _remove(self, row: int, place: int) -> None:
        if self._copies.remove(row, place) == 0:
            self._keys.remove(row)
