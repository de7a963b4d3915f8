"""How commands open the catalog to look at tenants and keys, or to change them."""

import asyncio
import getpass
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from kvtide.catalog import (
    Catalog,
    CatalogRejectedError,
    CatalogUnavailableError,
    Tenancy,
    catalog_url,
)
from kvtide.cli.found_blocks import CATALOG_LIMIT_S, NoCatalogError
from kvtide.runtime import SystemClock
from kvtide.runtime.settings import RoleSettings, hide_passwords


@asynccontextmanager
async def open_tenancy(settings: RoleSettings) -> AsyncGenerator[Tenancy]:
    """The catalog, made and migrated if it must be.

    Raises:
        NoCatalogError: it can't be read or written.
        CatalogRevisionError: it is newer than this program.
    """
    url = catalog_url(settings.catalog, settings.state_dir)
    try:
        async with asyncio.timeout(CATALOG_LIMIT_S), Catalog.open(url) as catalog:
            await catalog.migrate()
            yield Tenancy(catalog, SystemClock(), _actor())
    except (CatalogUnavailableError, CatalogRejectedError, TimeoutError) as error:
        why = hide_passwords(str(error)) or "it does not answer"
        raise NoCatalogError(f"the catalog can't be used: {why}") from error


def _actor() -> str:
    """Who sits at this terminal, as far as the system knows."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"cli:{name}"
