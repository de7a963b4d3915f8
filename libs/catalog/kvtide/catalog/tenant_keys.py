"""Keys of tenants: made once, and destroyed so that nothing of them is left in a file."""

from contextlib import suppress

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from kvtide.catalog.database import pragma
from kvtide.catalog.errors import CatalogUnavailableError
from kvtide.catalog.records import TenantKeyRow
from kvtide.catalog.rows import values
from kvtide.catalog.tables import tenant_keys


async def add_tenant_key(
    connection: AsyncConnection, row: TenantKeyRow
) -> TenantKeyRow:
    """Add it unless the tenant has one, or had: the one that is there now."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(tenant_keys).values(**values(row))
    await connection.execute(insert.on_conflict_do_nothing())
    found = await connection.execute(
        select(tenant_keys).where(tenant_keys.c.tenant_tag == row.tenant_tag)
    )
    return TenantKeyRow(**found.mappings().one())


async def scrubbing(connection: AsyncConnection) -> None:
    """Have SQLite overwrite with zeros what this transaction frees."""
    if connection.dialect.name == "sqlite":
        await connection.exec_driver_sql("PRAGMA secure_delete = ON")


async def scrub(engine: AsyncEngine) -> None:
    """Have SQLite's log, which holds pages as they were, written back and cut.

    While somebody reads an older state it can't be; the next checkpoint does it.
    PostgreSQL has no such thing: dead rows go with the next vacuum, its log with its
    own retention.
    """
    if engine.dialect.name != "sqlite":
        return
    with suppress(CatalogUnavailableError):
        await pragma(engine, "wal_checkpoint(TRUNCATE)")
