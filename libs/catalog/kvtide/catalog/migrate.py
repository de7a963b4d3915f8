"""Brings a database to the schema that this program knows.

Alembic is imported only when there is something to migrate: a process that starts on an
up-to-date catalog pays one query.
"""

import asyncio
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from kvtide.catalog.database import journal_mode, open_engine, transaction
from kvtide.catalog.errors import (
    CatalogRejectedError,
    CatalogRevisionError,
    CatalogUnavailableError,
)

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0007"
"""The newest revision in ``migrations/versions``; a test compares the two."""

_LOCK = 0x6B76_7469_6465  # "kvtide": the advisory lock that starters take in turn
_WAL_TRIES = 20
_WAL_PAUSE_S = 0.1


async def migrate(url: str) -> None:
    """Migrate the database at ``url``, from empty or any earlier revision.

    Several processes may do so at once: one works, the others wait and find it done.

    Raises:
        CatalogRevisionError: the schema is newer than this program, or not ours.
        CatalogUnavailableError: the database can't be reached or stays locked.
        ConfigError: the URL is wrong.
    """
    engine = open_engine(url)
    try:
        await migrate_engine(engine)
    finally:
        await engine.dispose()


async def migrate_engine(engine: AsyncEngine) -> None:
    """See ``migrate``; the engine stays open."""
    _make_folder(engine)
    found = await revision(engine)
    if found == HEAD:
        return
    _refuse_unknown(found)
    if engine.dialect.name == "sqlite":
        await _use_wal(engine)
    async with transaction(engine, writes=True) as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text("SET LOCAL lock_timeout = '30s'"))
            await connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK}
            )
        await connection.run_sync(_upgrade)


async def revision(engine: AsyncEngine) -> str | None:
    """The database's revision; None before the first migration.

    Raises:
        CatalogUnavailableError: the database can't be reached.
    """
    exists = (
        "SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'"
        if engine.dialect.name == "sqlite"
        else "SELECT count(*) FROM pg_tables WHERE tablename = 'alembic_version' "
        "AND schemaname = ANY (current_schemas(false))"
    )
    async with transaction(engine, writes=False) as connection:
        if not (await connection.execute(text(exists))).scalar_one():
            return None
        version = text("SELECT version_num FROM alembic_version")
        return (await connection.execute(version)).scalar_one_or_none()


def alembic_config(connection: Connection | None = None) -> "Config":
    """Alembic's configuration for the migrations in this package."""
    from alembic.config import Config  # noqa: PLC0415 - off the hot path

    config = Config()
    folder = resources.files("kvtide.catalog") / "migrations"
    config.set_main_option("script_location", str(folder))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _make_folder(engine: AsyncEngine) -> None:
    """SQLite makes its file but not the folder."""
    if engine.dialect.name != "sqlite" or engine.url.database is None:
        return
    folder = Path(engine.url.database).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CatalogUnavailableError(
            f"the catalog's folder {folder} can't be made: {error.strerror}"
        ) from error


def _refuse_unknown(found: str | None) -> None:
    if found is None:
        return
    from alembic.script import ScriptDirectory  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    try:
        ScriptDirectory.from_config(alembic_config()).get_revision(found)
    except CommandError as error:
        raise CatalogRevisionError(
            f"the catalog is at revision {found!r}, which this kvtide does not know "
            f"(its newest is {HEAD!r}): it was made by a newer one. Upgrade this "
            "installation, or give it another database with --catalog",
            found=found,
            known=HEAD,
        ) from error


def _upgrade(connection: Connection) -> None:
    from alembic import command  # noqa: PLC0415

    command.upgrade(alembic_config(connection), "head")


async def _use_wal(engine: AsyncEngine) -> None:
    """WAL is kept in the file; to set it, no other connection may be in the way."""
    for attempt in range(_WAL_TRIES):
        try:
            mode = await journal_mode(engine, "WAL")
        except CatalogUnavailableError:
            if attempt == _WAL_TRIES - 1:
                raise
            await asyncio.sleep(_WAL_PAUSE_S)
            continue
        if mode != "wal":
            raise CatalogRejectedError(
                "the catalog's SQLite file can't use write-ahead logging: put it on a "
                "local disk, not on a network file system"
            )
        return
