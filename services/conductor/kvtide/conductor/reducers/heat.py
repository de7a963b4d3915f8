"""How wanted each block is: its placements, each of half the weight a half-life later."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from kvtide.kv import BlockKey


class Heat:
    """The heat of the blocks placed last, bounded in number. Pure."""

    def __init__(self, *, half_life_s: float, tracked: int) -> None:
        """Everything is cold."""
        self._half_life_s = half_life_s
        self._tracked = tracked
        self._heat: OrderedDict[BlockKey, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks whose heat is known."""
        return len(self._heat)

    def add(self, key: BlockKey, now_s: float) -> float:
        """A placement reuses the block; its heat with it."""
        heat = self.of(key, now_s) + 1.0
        self._heat[key] = (heat, now_s)
        self._heat.move_to_end(key)
        if len(self._heat) > self._tracked:
            self._heat.popitem(last=False)
        return heat

    def of(self, key: BlockKey, now_s: float) -> float:
        """A block's heat now."""
        found = self._heat.get(key)
        if found is None:
            return 0.0
        heat, at_s = found
        return heat * 0.5 ** ((now_s - at_s) / self._half_life_s)

    def hottest(self, count: int, now_s: float, least: float) -> list[BlockKey]:
        """The hottest blocks of at least that heat; of equal ones the earlier first."""
        return [key for _, _, key in heapq.nlargest(count, self._warm(now_s, least))]

    def _warm(
        self, now_s: float, least: float
    ) -> Iterator[tuple[float, int, BlockKey]]:
        for place, key in enumerate(self._heat):
            heat = self.of(key, now_s)
            if heat >= least:
                yield heat, -place, key
