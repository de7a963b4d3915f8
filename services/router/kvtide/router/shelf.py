"""An engine's blocks as a store tells of them: numbered changes, and pages. Pure.

The engine's pages can't be read from outside, so a copy's slot says no more than whose
it is and how often it came.
"""

from bisect import bisect_right
from collections.abc import Iterator

from kvtide.bus.messages import BlocksChanged, Dropped, SnapshotPage, SnapshotPull
from kvtide.kv import BlockKey, Located, NodeRef, SlotRef, Tier
from kvtide.router.cache_map import Moved

MOST_IN_A_CHANGE = 1024
MOST_IN_A_PAGE = 4096


class Shelf:
    """What the agent says that its engine holds."""

    def __init__(self, me: NodeRef, block_bytes: int) -> None:
        """``me`` is the life of the agent that says it."""
        self._me = me
        self._block_bytes = block_bytes
        self._generations: dict[BlockKey, int] = {}
        self._generation = 0
        self._order: list[BlockKey] = []
        self._fresh: set[BlockKey] = set()
        self.seq = 0
        """The number of the last change."""

    def __len__(self) -> int:
        """Blocks that are there."""
        return len(self._generations)

    def changed(self, moved: Moved) -> list[BlocksChanged]:
        """What to tell all, in order."""
        whole = [*((key, True) for key in moved.dropped)]
        whole += [(key, False) for key in moved.added]
        return [
            self._change(whole[start : start + MOST_IN_A_CHANGE])
            for start in range(0, len(whole), MOST_IN_A_CHANGE)
        ]

    def _change(self, part: list[tuple[BlockKey, bool]]) -> BlocksChanged:
        added: list[Located] = []
        dropped: list[Dropped] = []
        for key, goes in part:
            if goes:
                self._fresh.discard(key)
                generation = self._generations.pop(key, None)
                if generation is not None:
                    dropped.append(Dropped(key, generation))
                continue
            self._generation += 1
            self._generations[key] = self._generation
            self._fresh.add(key)
            added.append(self._located(key))
        self.seq += 1
        return BlocksChanged(
            store=self._me, seq=self.seq, added=tuple(added), dropped=tuple(dropped)
        )

    def reborn(self, me: NodeRef) -> None:
        """The agent has another life: its changes are numbered anew."""
        self._me = me
        self.seq = 0

    def page(self, pull: SnapshotPull) -> SnapshotPage:
        """The next page by key, true now."""
        if pull.after is None:
            self._order = sorted(self._generations)
            self._fresh.clear()
        start = 0 if pull.after is None else bisect_right(self._order, pull.after)
        limit = max(1, min(pull.limit, MOST_IN_A_PAGE))
        part = self._order[start : start + limit]
        more = start + limit < len(self._order)
        last = part[-1] if more else None
        keys = [*part, *self._between(pull.after, last)]
        return SnapshotPage(
            store=self._me,
            seq=self.seq,
            located=tuple(
                self._located(key)
                for key in dict.fromkeys(keys)
                if key in self._generations
            ),
            next_key=last,
        )

    def _between(
        self, after: BlockKey | None, last: BlockKey | None
    ) -> Iterator[BlockKey]:
        """Keys that came since the pages were put in order."""
        for key in self._fresh:
            if (after is None or key > after) and (last is None or key <= last):
                yield key

    def _located(self, key: BlockKey) -> Located:
        generation = self._generations[key]
        slot = SlotRef(
            node=self._me.node,
            epoch=self._me.epoch,
            tier=Tier.DRAM,
            arena=0,
            offset=0,
            length=self._block_bytes,
            generation=generation,
        )
        return Located(key, slot, 0)
