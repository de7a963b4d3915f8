"""What people removed, kept in the catalog for the stores that are down meanwhile."""

import asyncio

from kvtide.bus.messages import BlockSelector
from kvtide.catalog import (
    Catalog,
    CatalogError,
    DeletionRow,
    RemovedBlockRow,
    catalog_url,
    is_missing,
)
from kvtide.cli.found_blocks import CATALOG_LIMIT_S, NoCatalogError
from kvtide.kv import NodeId, Role
from kvtide.runtime.settings import RoleSettings, hide_passwords


async def keep_tombstone(
    settings: RoleSettings, select: BlockSelector, until_s: float
) -> tuple[NodeId, ...]:
    """Have stores that start later, or are cut off, forget what was stored until then.

    ``select`` names keys, or a tenant or model, and not both. Returns the stores that
    the catalog knows: not all of them need be there.

    Raises:
        NoCatalogError: it is away, or there is none.
    """
    url = catalog_url(settings.catalog, settings.state_dir)
    if is_missing(url):
        raise NoCatalogError("there is no catalog at " + url.partition(":///")[2])
    rows: list[DeletionRow | RemovedBlockRow]
    if select.keys is None:
        rows = [DeletionRow(select.tenant or b"", select.model or b"", until_s)]
    else:
        rows = [RemovedBlockRow(key, until_s) for key in select.keys]
    try:
        async with asyncio.timeout(CATALOG_LIMIT_S), Catalog.open(url) as catalog:
            await catalog.migrate()
            await catalog.write(rows)
            nodes = await catalog.nodes()
    except (CatalogError, TimeoutError) as error:
        why = hide_passwords(str(error)) or "it does not answer"
        raise NoCatalogError(f"the catalog can't be written: {why}") from error
    return tuple(each.node for each in nodes if Role.STORE in each.roles)
