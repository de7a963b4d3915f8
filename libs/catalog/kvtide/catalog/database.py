"""Opens databases: URLs, SQLite's settings, and one translation of driver errors."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    InvalidatePoolError,
    NoSuchModuleError,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from kvtide.catalog.errors import (
    CatalogLostError,
    CatalogRejectedError,
    CatalogUnavailableError,
)
from kvtide.runtime import ConfigError

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}
_BEGIN = "kvtide_begin"
_FILE = "kvtide_file"
_LOST = ("no such table", "unable to open database file", "UndefinedTableError")
BUSY_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 10.0


def catalog_url(url: str, state_dir: Path) -> str:
    """The URL that a setting means: itself, or SQLite in the state folder if empty.

    Raises:
        ConfigError: not a database URL, or not SQLite or PostgreSQL.
    """
    if not url:
        path = state_dir.expanduser() / "catalog.sqlite3"
        return f"sqlite+aiosqlite:///{path}"
    return _parsed(url).render_as_string(hide_password=False)


def is_missing(url: str) -> bool:
    """Whether opening would make a database file: looking on must not."""
    file = url.partition(":///")[2] if url.startswith("sqlite") else ""
    return bool(file) and not Path(file).exists()


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(
            "catalog: this is no database URL; write sqlite:////path/to/file or "
            "postgresql://user:password@host/database",
            key="catalog",
        ) from None
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise ConfigError(
            f"catalog: {parsed.drivername!r} is not supported; use sqlite or postgresql",
            key="catalog",
        )
    if driver.startswith("sqlite") and parsed.database in {None, "", ":memory:"}:
        raise ConfigError(
            "catalog: SQLite needs a file, for all roles share it", key="catalog"
        )
    return parsed.set(drivername=driver)


class _SqliteConnection(Protocol):
    """What this file uses of a DBAPI connection to SQLite."""

    isolation_level: str | None

    def cursor(self) -> Any: ...


def open_engine(url: str) -> AsyncEngine:
    """An engine for the catalog at ``url``; no connection is made yet.

    Raises:
        ConfigError: see ``catalog_url``; or the database's driver is not installed.
    """
    parsed = _parsed(url)
    try:
        if parsed.drivername.startswith("sqlite"):
            return _open_sqlite(parsed)
        return create_async_engine(
            parsed,
            pool_size=2,
            max_overflow=4,
            pool_timeout=CONNECT_TIMEOUT_S,
            pool_pre_ping=True,
            connect_args={
                "timeout": CONNECT_TIMEOUT_S,
                "command_timeout": STATEMENT_TIMEOUT_S,
            },
        )
    except (ImportError, NoSuchModuleError) as error:
        raise ConfigError(
            f"catalog: the driver for {parsed.drivername} is missing ({error}); "
            "install kvtide[catalog]",
            key="catalog",
        ) from error


def _open_sqlite(url: URL) -> AsyncEngine:
    engine = create_async_engine(
        url, pool_timeout=CONNECT_TIMEOUT_S, connect_args={"timeout": BUSY_TIMEOUT_S}
    )

    path = url.database or ""

    def connected(connection: _SqliteConnection, record: ConnectionPoolEntry) -> None:
        record.info[_FILE] = _file_at(path)
        # the driver's own implicit transactions would leave DDL and SELECT outside
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.close()

    def begin(connection: Connection) -> None:
        # a deferred transaction that writes later can fail at once instead of waiting
        options = cast("dict[str, object]", connection.get_execution_options())
        if mode := options.get(_BEGIN, "DEFERRED"):
            connection.exec_driver_sql(f"BEGIN {mode}")

    def checked_out(
        _connection: _SqliteConnection, record: ConnectionPoolEntry, _proxy: object
    ) -> None:
        # a file that was removed can still be written to, and nobody would ever see it
        if record.info.get(_FILE) != _file_at(path):
            raise InvalidatePoolError

    event.listen(engine.sync_engine, "connect", connected)
    event.listen(engine.sync_engine, "checkout", checked_out)
    event.listen(engine.sync_engine, "begin", begin)
    return engine


def _file_at(path: str) -> tuple[int, int] | None:
    """Which file has this name at present."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@asynccontextmanager
async def transaction(
    engine: AsyncEngine, *, writes: bool
) -> AsyncGenerator[AsyncConnection]:
    """One transaction: committed at the end, rolled back on an error.

    Raises:
        CatalogUnavailableError: down, locked, full or slow.
        CatalogLostError: the tables are gone.
        CatalogRejectedError: the statement or its values can never work.
    """
    try:
        async with engine.connect() as connection:
            if writes:
                await connection.execution_options(**{_BEGIN: "IMMEDIATE"})
            async with connection.begin():
                yield connection
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise _translated(error) from error


async def journal_mode(engine: AsyncEngine, mode: str) -> str:
    """Set SQLite's journal mode, outside any transaction; returns what is in force.

    Raises:
        CatalogUnavailableError: another connection is in the way.
    """
    return await pragma(engine, f"journal_mode = {mode}")


async def pragma(engine: AsyncEngine, text: str) -> str:
    """Have SQLite do this, outside any transaction; the first value that it answers.

    Raises:
        CatalogUnavailableError: another connection is in the way.
    """
    try:
        async with engine.connect() as connection:
            await connection.execution_options(**{_BEGIN: ""})
            result = await connection.exec_driver_sql(f"PRAGMA {text}")
            return str(result.scalars().one())
    except (SQLAlchemyError, OSError) as error:
        raise _translated(error) from error


def _translated(
    error: Exception,
) -> CatalogUnavailableError | CatalogRejectedError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    text = f"{type(cause).__name__}: {cause}".splitlines()[0][:300]
    if any(sign in text for sign in _LOST):
        return CatalogLostError(f"the catalog's tables are gone: {text}")
    refused = (IntegrityError, DataError, ProgrammingError, NotSupportedError)
    if isinstance(error, refused):
        return CatalogRejectedError(f"the catalog refuses a row: {text}")
    return CatalogUnavailableError(f"the catalog is not available: {text}")
