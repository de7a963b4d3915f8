"""Small numbers for the lives of stores, so that a copy names its store in two bytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.kv import NodeId, NodeRef

MAX_LIVES = 65_535
KNOWN_EPOCHS = 16_384


@dataclass(slots=True)
class StoreLife:
    """One life of a store; ``copies`` are those of it in the index.

    ``warm``: all of them are of a catalog; the store itself has said nothing yet.
    """

    ref: NodeRef
    number: int
    copies: int = 0
    warm: bool = False


class StoreLives:
    """The newest life of each store. A retired number waits until it is swept."""

    def __init__(self) -> None:
        """Nobody is known."""
        self._stores: dict[NodeId, StoreLife] = {}
        self._lives: dict[int, StoreLife] = {}
        self._epochs: dict[NodeId, int] = {}
        self._free: list[int] = []
        self._next = 0
        self._known = np.zeros(MAX_LIVES + 1, dtype=bool)
        self.retired: set[int] = set()
        self.version = 0
        """Changes whenever a life begins or ends."""

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether a number is that of a known life."""
        return self._known

    def all(self) -> tuple[StoreLife, ...]:
        """All known lives."""
        return tuple(self._stores.values())

    def of(self, store: NodeId) -> StoreLife | None:
        """A store's known life."""
        return self._stores.get(store)

    def numbered(self, number: int) -> StoreLife | None:
        """The life of that number, unless it is over."""
        return self._lives.get(number)

    def open(self, store: NodeRef) -> StoreLife | None:
        """That life, which may be new. None for one that is over, or one too many."""
        life = self._stores.get(store.node)
        if life is not None and life.ref.epoch == store.epoch:
            return life
        if store.epoch < self._epochs.get(store.node, 0):
            return None
        if life is not None:
            self.close(store.node)
        number = self._free.pop() if self._free else self._next
        if number > MAX_LIVES:
            return None
        self._next = max(self._next, number + 1)
        life = StoreLife(store, number)
        self._stores[store.node] = life
        self._lives[number] = life
        self._known[number] = True
        self._learn(store)
        self.version += 1
        return life

    def close(self, store: NodeId) -> None:
        """Nothing is known of this store any more."""
        life = self._stores.pop(store, None)
        if life is not None:
            del self._lives[life.number]
            self._known[life.number] = False
            self.retired.add(life.number)
            self.version += 1

    def reuse(self, numbers: set[int]) -> None:
        """No copy carries these numbers any more."""
        self._free += numbers

    def _learn(self, store: NodeRef) -> None:
        self._epochs[store.node] = store.epoch
        if len(self._epochs) > KNOWN_EPOCHS + len(self._stores):
            oldest = next(node for node in self._epochs if node not in self._stores)
            del self._epochs[oldest]
