"""Blocks as people look at them: from the catalog, or from the live stores."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvtide.bus.interface import Bus
from kvtide.bus.messages import BlockListing, BlockSelector
from kvtide.catalog import (
    BlockOrder,
    BlockQuery,
    BlockRow,
    Catalog,
    CatalogError,
    catalog_url,
    is_missing,
)
from kvtide.cli.block_names import BlockNames
from kvtide.cli.stores import list_blocks
from kvtide.kv import BlockKey, NodeId, Tier
from kvtide.runtime import KvtideError
from kvtide.runtime.settings import RoleSettings, hide_passwords

CATALOG_LIMIT_S = 10.0
LIVE_LIMIT = 200_000
"""Copies of live stores that are looked at to find those that come first."""


class NoCatalogError(KvtideError):
    """The catalog can't be read."""


class Source(StrEnum):
    """Where blocks are looked up: by itself the catalog, and without it the stores."""

    AUTO = "auto"
    CATALOG = "catalog"
    STORES = "stores"


class ShownBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One copy. What a source does not know is None; ages are in seconds."""

    key: str
    node: str
    tier: str
    tenant: str
    tenant_tag: str
    model: str
    model_tag: str
    tokens: int
    bytes: int
    uses: int
    age_s: float | None = None
    idle_s: float | None = None
    pinned: str = ""
    extra: bool | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked for; ages in seconds, None: any."""

    select: BlockSelector
    node: NodeId | None = None
    tier: Tier | None = None
    older_s: float | None = None
    idle_s: float | None = None
    least_uses: int | None = None
    order: BlockOrder = BlockOrder.KEY
    limit: int = 50


async def from_catalog(
    settings: RoleSettings, names: BlockNames, wanted: Wanted, wall_s: float
) -> list[ShownBlock]:
    """The copies that the catalog has rows of.

    Raises:
        NoCatalogError: it is away, or there is none.
    """
    keys = wanted.select.keys
    query = BlockQuery(
        node=wanted.node,
        tier=wanted.tier,
        model_tag=wanted.select.model,
        tenant_tag=wanted.select.tenant,
        key=keys[0] if keys else None,
        stored_before_s=None if wanted.older_s is None else wall_s - wanted.older_s,
        used_before_s=None if wanted.idle_s is None else wall_s - wanted.idle_s,
        least_hits=wanted.least_uses,
        order=wanted.order,
        limit=wanted.limit,
    )
    rows = await _rows(settings, query, names)
    return [_of_row(row, names, wall_s) for row in rows]


async def catalog_keys(
    settings: RoleSettings, first: BlockKey, last: BlockKey, limit: int
) -> set[BlockKey]:
    """Keys from ``first`` to ``last`` of the catalog's rows, of at most so many rows.

    Raises:
        NoCatalogError: it is away, or there is none.
    """
    query = BlockQuery(key_range=(first, last), limit=limit)
    return {row.key for row in await _rows(settings, query)}


async def _rows(
    settings: RoleSettings, query: BlockQuery, names: BlockNames | None = None
) -> tuple[BlockRow, ...]:
    url = catalog_url(settings.catalog, settings.state_dir)
    if is_missing(url):
        raise NoCatalogError("there is no catalog at " + url.partition(":///")[2])
    try:
        async with asyncio.timeout(CATALOG_LIMIT_S), Catalog.open(url) as catalog:
            if names is not None:
                names.learn(tenants=[row.tenant for row in await catalog.tenants()])
            return await catalog.blocks(query)
    except (CatalogError, TimeoutError) as error:
        why = hide_passwords(str(error)) or "it does not answer"
        raise NoCatalogError(f"the catalog can't be read: {why}") from error


async def from_stores(
    bus: Bus, stores: list[NodeId], names: BlockNames, wanted: Wanted
) -> list[ShownBlock]:
    """The copies that live stores say they have.

    Raises:
        NoStoreError: one of them does not answer.
    """
    found: list[ShownBlock] = []
    looked = 0
    async for node, listing in list_blocks(bus, stores, wanted.select):
        looked += 1
        shown = _of_listing(node, listing, names)
        if _fits(shown, wanted):
            found.append(shown)
        enough = wanted.order is BlockOrder.KEY and len(found) >= wanted.limit
        if enough or looked >= LIVE_LIMIT:
            break
    if wanted.order is BlockOrder.HOTTEST:
        found.sort(key=lambda block: -block.uses)
    elif wanted.order is BlockOrder.IDLE:
        found.sort(key=lambda block: -(block.idle_s or 0.0))
    return found[: wanted.limit]


def _fits(block: ShownBlock, wanted: Wanted) -> bool:
    """What a store can't be asked for; it does not know how old a block is."""
    tier = wanted.tier is None or block.tier == wanted.tier.value
    uses = wanted.least_uses is None or block.uses >= wanted.least_uses
    idle = (
        wanted.idle_s is None or block.idle_s is None or block.idle_s >= wanted.idle_s
    )
    return tier and uses and idle


def _of_row(row: BlockRow, names: BlockNames, wall_s: float) -> ShownBlock:
    return ShownBlock(
        key=row.key.hex(),
        node=row.node,
        tier=row.tier.value,
        tenant=names.tenant(row.tenant_tag),
        tenant_tag=row.tenant_tag.hex(),
        model=names.model(row.model_tag),
        model_tag=row.model_tag.hex(),
        tokens=row.tokens,
        bytes=row.length,
        uses=row.hits,
        age_s=max(0.0, wall_s - row.stored_at_s),
        idle_s=max(0.0, wall_s - row.used_at_s),
    )


def _of_listing(node: NodeId, listing: BlockListing, names: BlockNames) -> ShownBlock:
    soft = f"{listing.soft_ms / 1e3:.0f} s" if listing.soft_ms > 0 else ""
    return ShownBlock(
        key=listing.located.key.hex(),
        node=node,
        tier=listing.located.slot.tier.value,
        tenant=names.tenant(listing.tenant),
        tenant_tag=listing.tenant.hex(),
        model=names.model(listing.model),
        model_tag=listing.model.hex(),
        tokens=listing.tokens,
        bytes=listing.located.slot.length,
        uses=listing.uses,
        idle_s=None if listing.idle_ms is None else listing.idle_ms / 1e3,
        pinned="hard" if listing.hard else soft,
        extra=listing.extra,
    )
