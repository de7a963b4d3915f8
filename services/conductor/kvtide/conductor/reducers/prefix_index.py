"""Which copy of which block is where.

Built to be small: a key maps to one ``bytes`` of packed copies, and a store's life is a
small number in them. To forget a store is to retire its number, whatever it held;
``sweep`` then clears what carries retired numbers, a bounded piece at a time, and the
number is used again only after a whole round.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtide.bus.messages import Dropped
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, Tier

_COPY = struct.Struct("<HBxHxxQQQQ")
"""Life number, tier, arena, offset, length, generation, header's xxh3."""

_TIERS: tuple[Tier, ...] = tuple(Tier)
_TIER_NUMBER = {tier: number for number, tier in enumerate(_TIERS)}
MAX_LIVES = 65_535
KNOWN_EPOCHS = 16_384


@dataclass(slots=True)
class _Life:
    """One life of a store; ``copies`` are those of it that are in the index."""

    ref: NodeRef
    number: int
    copies: int = 0


class PrefixIndex:
    """Copies by key, of stores that are not forgotten. Applying twice changes nothing."""

    def __init__(self) -> None:
        """Start empty."""
        self._copies: dict[BlockKey, bytes] = {}
        self._stores: dict[NodeId, _Life] = {}
        self._lives: dict[int, _Life] = {}
        self._exact: set[NodeId] = set()
        self._epochs: dict[NodeId, int] = {}
        self._free: list[int] = []
        self._next_number = 0
        self._retired: set[int] = set()
        self._sweeping: set[int] = set()
        self._unswept: list[BlockKey] = []

    @property
    def blocks(self) -> int:
        """Keys in the index; those of forgotten stores count until they are swept."""
        return len(self._copies)

    @property
    def copies(self) -> int:
        """Copies at stores that are not forgotten."""
        return sum(life.copies for life in self._stores.values())

    def is_exact(self, store: NodeId) -> bool:
        """Whether this store's blocks are known completely."""
        return store in self._exact

    def copies_at(self, store: NodeId) -> int:
        """Copies at one store."""
        life = self._stores.get(store)
        return life.copies if life is not None else 0

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        """Take changes of one life of a store, drops first; of an older life: nothing."""
        life = self._life(store)
        if life is None:
            return
        for drop in dropped:
            self._drop(life, drop)
        for located in added:
            if located.slot.owner == store:
                self._add(life, located)

    def forget(self, store: NodeId) -> None:
        """Nothing is known of this store any more."""
        self._exact.discard(store)
        life = self._stores.pop(store, None)
        if life is not None:
            del self._lives[life.number]
            self._retired.add(life.number)

    def forget_life(self, ref: NodeRef) -> None:
        """This life of a store is over. What a later one said already stays."""
        life = self._stores.get(ref.node)
        if life is not None and life.ref.epoch <= ref.epoch:
            self.forget(ref.node)

    def set_exact(self, store: NodeId, *, exact: bool) -> None:
        """Say whether a store's blocks are known completely."""
        if exact:
            self._exact.add(store)
        else:
            # nothing is kept of a store that is gone
            self._exact.discard(store)

    def prefix(self, keys: Sequence[BlockKey]) -> list[tuple[Located, ...]]:
        """The copies of the first keys, up to the first one that has none."""
        found: list[tuple[Located, ...]] = []
        for key in keys:
            copies = tuple(self._located(key))
            if not copies:
                break
            found.append(copies)
        return found

    def sweep(self, limit: int) -> None:
        """Clear up to ``limit`` keys of copies at forgotten stores."""
        if not self._unswept:
            self._free += self._sweeping
            self._sweeping = self._retired
            self._retired = set()
            if self._sweeping:
                self._unswept = list(self._copies)
        for _ in range(min(limit, len(self._unswept))):
            self._clear(self._unswept.pop())

    def _life(self, store: NodeRef) -> _Life | None:
        life = self._stores.get(store.node)
        if life is not None and life.ref.epoch == store.epoch:
            return life
        if store.epoch < self._epochs.get(store.node, 0):
            return None
        if life is not None:
            self.forget(store.node)
        return self._open(store)

    def _open(self, store: NodeRef) -> _Life | None:
        number = self._free.pop() if self._free else self._next_number
        if number > MAX_LIVES:
            return None
        self._next_number = max(self._next_number, number + 1)
        life = _Life(store, number)
        self._stores[store.node] = life
        self._lives[number] = life
        self._learn(store)
        return life

    def _learn(self, store: NodeRef) -> None:
        self._epochs[store.node] = store.epoch
        if len(self._epochs) > KNOWN_EPOCHS + len(self._stores):
            oldest = next(node for node in self._epochs if node not in self._stores)
            del self._epochs[oldest]

    def _located(self, key: BlockKey) -> Iterator[Located]:
        packed = self._copies.get(key, b"")
        for copy in _COPY.iter_unpack(packed):
            number, tier, arena, offset, length, generation, xxh3 = copy
            life = self._lives.get(number)
            if life is None:
                continue
            slot = SlotRef(
                node=life.ref.node,
                epoch=life.ref.epoch,
                tier=_TIERS[int(tier)],
                arena=arena,
                offset=offset,
                length=length,
                generation=generation,
            )
            yield Located(key, slot, xxh3)

    def _add(self, life: _Life, located: Located) -> None:
        """A store has at most one copy of a key in a tier: the newest replaces it."""
        tier = _TIER_NUMBER[located.slot.tier]
        packed = _packed(life.number, tier, located)
        if packed is None:
            return
        known = self._copies.get(located.key, b"")
        others = [
            copy for copy in _pieces(known) if _place(copy) != (life.number, tier)
        ]
        kept = [copy for copy in others if _place(copy)[0] in self._lives]
        if len(others) * _COPY.size == len(known):
            life.copies += 1
        self._copies[located.key] = b"".join((*kept, packed))

    def _drop(self, life: _Life, drop: Dropped) -> None:
        known = self._copies.get(drop.key)
        if known is None:
            return
        kept: list[bytes] = []
        for copy in _pieces(known):
            number, _, _, _, _, generation, _ = _COPY.unpack(copy)
            if number == life.number and generation == drop.generation:
                life.copies -= 1
            else:
                kept.append(copy)
        self._keep(drop.key, kept)

    def _clear(self, key: BlockKey) -> None:
        known = self._copies.get(key)
        if known is not None:
            pieces = _pieces(known)
            self._keep(key, [c for c in pieces if _place(c)[0] in self._lives])

    def _keep(self, key: BlockKey, copies: list[bytes]) -> None:
        if copies:
            self._copies[key] = b"".join(copies)
        else:
            del self._copies[key]


def _packed(number: int, tier: int, located: Located) -> bytes | None:
    """The copy as bytes; None if a number is none that a store could mean."""
    slot = located.slot
    numbers = (slot.arena, slot.offset, slot.length, slot.generation)
    try:
        return _COPY.pack(number, tier, *numbers, located.header_xxh3)
    except struct.error:
        return None


def _pieces(packed: bytes) -> list[bytes]:
    size = _COPY.size
    return [packed[start : start + size] for start in range(0, len(packed), size)]


def _place(copy: bytes) -> tuple[int, int]:
    return int.from_bytes(copy[:2], "little"), copy[2]
