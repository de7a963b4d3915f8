"""A conductor that has just started learns from the catalog what stores hold.

Only a hint: it counts until a store's own snapshot comes, seconds later.
"""

import asyncio
from collections.abc import Sequence

import structlog

from kvtide.bus import Node
from kvtide.catalog import BlockQuery, BlockRow, Catalog, CatalogError
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import BlocksWarmed
from kvtide.kv import Located, NodeRef, Role, SlotRef

_PAGE_ROWS = 2000
_LIMIT_S = 60.0
_SIGHT_S = 5.0
_SIGHT_TURN_S = 0.1

_log = structlog.get_logger("kvtide.conductor")


async def warm(catalog: Catalog, node: Node, dispatcher: Dispatcher) -> None:
    """Feed the index with the rows of live stores; ends early if the catalog is down."""
    rows = 0
    try:
        async with asyncio.timeout(_LIMIT_S):
            await _first_store(node)
            for member in node.roster.live(Role.STORE):
                rows += await _warm_store(catalog, node, dispatcher, member.ref)
    except (CatalogError, TimeoutError) as error:
        _log.info("index_not_warmed", rows=rows, why=str(error))
    else:
        _log.info("index_warmed", rows=rows)


async def _first_store(node: Node) -> None:
    """Beats come every half second: until then nobody is known."""
    for _ in range(int(_SIGHT_S / _SIGHT_TURN_S)):
        if node.roster.live(Role.STORE):
            break
        await node.clock.sleep(_SIGHT_TURN_S)


async def _warm_store(
    catalog: Catalog, node: Node, dispatcher: Dispatcher, store: NodeRef
) -> int:
    rows = 0
    last: BlockRow | None = None
    while True:
        query = BlockQuery(node=store.node, after=last, limit=_PAGE_ROWS)
        page = await catalog.blocks(query)
        event = BlocksWarmed(store, located_rows(page, store))
        dispatcher.handle(event, node.clock.monotonic())
        rows += len(event.located)
        if len(page) < _PAGE_ROWS:
            return rows
        last = page[-1]


def located_rows(page: Sequence[BlockRow], store: NodeRef) -> tuple[Located, ...]:
    """The rows of exactly this life of a store as copies; others are of lost arenas."""
    return tuple(
        Located(
            row.key,
            SlotRef(
                node=row.node,
                epoch=row.epoch,
                tier=row.tier,
                arena=row.arena,
                offset=row.offset,
                length=row.length,
                generation=row.generation,
            ),
            row.header_xxh3,
        )
        for row in page
        if row.epoch == store.epoch
    )
