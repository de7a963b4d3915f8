"""The store's own rows in the catalog, written behind: serving never waits for SQL."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kvtide.catalog import (
    BlockDropped,
    BlockRow as CatalogBlock,
    BlocksForgotten,
    BlockUsed,
    Change,
)
from kvtide.kv import NodeRef, Tier
from kvtide.runtime import Clock
from kvtide.store.events import BlockRow, WriteRows


class BlockRows(Protocol):
    """Where block rows go. Never blocks, never fails; bounded by its owner."""

    def begin(self, store: NodeRef) -> None:
        """A life of the store begins: rows of earlier ones are of no use."""
        ...

    def write(self, store: NodeRef, rows: WriteRows) -> None:
        """Copies that went, then copies that came."""
        ...

    def used(self, rows: Sequence[BlockUsed]) -> None:
        """Which copies were wanted, and how often."""
        ...

    def repair(self, store: NodeRef, rows: Iterable[BlockRow]) -> Iterator[Change]:
        """What makes the catalog right again; takes ``rows`` as it is taken itself."""
        ...

    def end(self, store: NodeRef) -> None:
        """The store's life ends cleanly, and its memory with it; the SSD stays."""
        ...


class NoRows:
    """For a store without a catalog."""

    def begin(self, store: NodeRef) -> None:
        """See ``BlockRows.begin``."""

    def write(self, store: NodeRef, rows: WriteRows) -> None:
        """See ``BlockRows.write``."""

    def used(self, rows: Sequence[BlockUsed]) -> None:
        """See ``BlockRows.used``."""

    def repair(self, store: NodeRef, rows: Iterable[BlockRow]) -> Iterator[Change]:
        """See ``BlockRows.repair``."""
        del store, rows
        return iter(())

    def end(self, store: NodeRef) -> None:
        """See ``BlockRows.end``."""


class CatalogRows:
    """Rows as changes of the catalog, put into a ``kvtide.catalog.Writer``."""

    def __init__(self, put: Callable[[Change], None], clock: Clock) -> None:
        """``put`` queues one change and returns at once."""
        self._put = put
        self._clock = clock

    def begin(self, store: NodeRef) -> None:
        """See ``BlockRows.begin``."""
        for tier in Tier:
            self._put(BlocksForgotten(store.node, tier, store.epoch))

    def write(self, store: NodeRef, rows: WriteRows) -> None:
        """See ``BlockRows.write``."""
        now_s = self._clock.wall()
        for gone in rows.gone:
            self._put(
                BlockDropped(
                    node=store.node,
                    key=gone.key,
                    tier=gone.tier,
                    generation=gone.generation,
                    reason=gone.reason,
                    gone_at_s=now_s,
                )
            )
        for came in rows.came:
            self._put(_catalog_row(came, now_s))

    def used(self, rows: Sequence[BlockUsed]) -> None:
        """See ``BlockRows.used``."""
        for row in rows:
            self._put(row)

    def repair(self, store: NodeRef, rows: Iterable[BlockRow]) -> Iterator[Change]:
        """See ``BlockRows.repair``.

        That a copy of this life went may be among what was lost, so all rows go first.
        """
        for tier in Tier:
            yield BlocksForgotten(store.node, tier, store.epoch + 1)
        for row in rows:
            yield _catalog_row(row, self._clock.wall())

    def end(self, store: NodeRef) -> None:
        """See ``BlockRows.end``."""
        self._put(BlocksForgotten(store.node, Tier.DRAM, store.epoch + 1))


def _catalog_row(row: BlockRow, now_s: float) -> CatalogBlock:
    slot = row.located.slot
    return CatalogBlock(
        node=slot.node,
        key=row.located.key,
        tier=row.tier,
        epoch=slot.epoch,
        key_id=row.tags.key_id,
        model_tag=row.tags.model,
        layout_tag=row.tags.layout,
        tenant_tag=row.tags.tenant,
        tokens=row.tokens,
        arena=slot.arena,
        offset=slot.offset,
        length=slot.length,
        generation=slot.generation,
        header_xxh3=row.located.header_xxh3,
        stored_at_s=now_s,
        used_at_s=now_s,
    )
