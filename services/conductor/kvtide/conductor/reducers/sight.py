"""Where the copies of a prompt are, as a policy sees them: at live stores only."""

from collections.abc import Sequence

import numpy as np

from kvtide.conductor.reducers.fleet import FleetTable
from kvtide.conductor.reducers.membership import Membership
from kvtide.conductor.reducers.prefix_index import TIERS, PrefixIndex
from kvtide.conductor.reducers.store_lives import MAX_LIVES
from kvtide.kv import BlockKey, Located, Tier
from kvtide.policy import Holdings

_GONE = -1
_SSD = TIERS.index(Tier.SSD)


class Sight:
    """Joins the index, which knows lives of stores, with who lives and where."""

    def __init__(
        self, members: Membership, index: PrefixIndex, fleet: FleetTable
    ) -> None:
        """All three are read only."""
        self._members = members
        self._index = index
        self._fleet = fleet
        self._host = np.full(MAX_LIVES + 1, _GONE, dtype=np.int64)
        self._hint = np.ones(MAX_LIVES + 1, dtype=bool)
        self._seen: tuple[tuple[int, int], int] | None = None

    def holdings(self, keys: Sequence[BlockKey]) -> Holdings:
        """The copies of the first keys. True until the next change of the index."""
        self._refresh()
        found = self._index.find(keys)
        host = self._host.take(found.life)
        block, place, life, tier = found.block, found.place, found.life, found.tier
        gone = host == _GONE
        if gone.any():
            live = ~gone
            host, block, place = host[live], block[live], place[live]
            life, tier = life[live], tier[live]

        def located(row: int) -> Located:
            return self._index.located(keys[int(block[row])], int(place[row]))

        return Holdings(
            blocks=found.blocks,
            block=block,
            host=host,
            ssd=tier == _SSD,
            hint=self._hint.take(life),
            located=located,
        )

    def _refresh(self) -> None:
        seen = (self._index.version, self._members.version)
        if seen == self._seen:
            return
        self._seen = seen
        self._host[:] = _GONE
        for life in self._index.lives.all():
            store = self._members.get(life.ref.node)
            if store is not None and store.node == life.ref:
                self._host[life.number] = self._fleet.host_number(store.host)
                self._hint[life.number] = not self._index.is_exact(life.ref.node)
