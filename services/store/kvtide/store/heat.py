"""How often blocks are wanted, gathered for the catalog: a placement writes no row. Pure."""

from collections.abc import Sequence

from kvtide.catalog import BlockUsed
from kvtide.kv import BlockKey
from kvtide.store.inventory import Inventory
from kvtide.store.ssd.tier import SsdTier


class UseLog:
    """The blocks that were wanted since the last rows; bounded in number."""

    def __init__(self, *, every_s: float = 30.0, limit: int = 10_000) -> None:
        """Nothing was wanted. Of more than ``limit`` blocks the later ones are left out."""
        self._every_s = every_s
        self._limit = limit
        self._wanted: dict[BlockKey, int] = {}
        self._since_s: float | None = None

    def note(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """A placement names these."""
        if self._since_s is None:
            self._since_s = now_s
        for key in keys:
            if key in self._wanted or len(self._wanted) < self._limit:
                self._wanted[key] = self._wanted.get(key, 0) + 1

    def due(self, now_s: float) -> bool:
        """Whether rows should be written."""
        return self._since_s is not None and now_s - self._since_s >= self._every_s

    def take(
        self, inventory: Inventory, ssd: SsdTier, wall_s: float
    ) -> list[BlockUsed]:
        """Rows of those that are still here; the count is that since they came."""
        wanted, self._wanted, self._since_s = self._wanted, {}, None
        rows: list[BlockUsed] = []
        for key, times in wanted.items():
            slot = inventory.index.get(key)
            located = ssd.find(key) if slot is None else inventory.located(slot)
            if located is None:
                continue
            hits = times if slot is None else inventory.table.uses[slot]
            rows.append(
                BlockUsed(
                    node=located.slot.node,
                    key=key,
                    tier=located.slot.tier,
                    generation=located.slot.generation,
                    used_at_s=wall_s,
                    hits=hits,
                )
            )
        return rows
