"""The catalog when its database is locked, full or gone: typed errors, then repair."""

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.integration.postgres import postgres_server

from kvtide.catalog import (
    Catalog,
    CatalogRejectedError,
    CatalogUnavailableError,
    NodeRow,
    TenantRow,
    Writer,
    WriterLimits,
    catalog_url,
)
from kvtide.catalog.database import journal_mode, open_engine, transaction
from kvtide.kv import NodeId, TenantId
from kvtide.runtime import ConfigError, SystemClock

pytestmark = pytest.mark.timeout(240)  # waits on real databases

NODE = NodeRow(NodeId("s"), 1, ("store",), "h", "ready", "", 1.0)
QUICK = WriterLimits(
    capacity=50, batch=10, linger_s=0.01, first_pause_s=0.05, longest_pause_s=0.2
)


def tenant(number: int, size: int = 10) -> TenantRow:
    return TenantRow(TenantId(f"t{number:05}"), "x" * size, 1.0)


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncGenerator[Catalog]:
    async with Catalog.open(f"sqlite:///{tmp_path}/catalog.sqlite3") as catalog:
        await catalog.migrate()
        yield catalog


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Another process's connection holds the file exclusively."""
    other = sqlite3.connect(path / "catalog.sqlite3", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


async def test_a_locked_database_is_unavailable_then_works(
    catalog: Catalog, tmp_path: Path
) -> None:
    with locked(tmp_path):
        with pytest.raises(CatalogUnavailableError, match="locked"):
            await catalog.write([NODE])
        # write-ahead logging: readers go on
        assert await catalog.nodes() == ()
    await catalog.write([NODE])
    assert await catalog.nodes() == (NODE,)


async def test_a_short_lock_is_waited_for(catalog: Catalog, tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        with locked(tmp_path):
            write = group.create_task(catalog.write([NODE]))
            await asyncio.sleep(0.3)
            assert not write.done()
    assert await catalog.nodes() == (NODE,)


async def test_the_writer_outlives_a_lock_and_repairs(
    catalog: Catalog, tmp_path: Path
) -> None:
    repairs: list[int] = []
    writer = Writer(
        catalog,
        clock=SystemClock(),
        limits=QUICK,
        on_repair=lambda: repairs.append(1),
    )
    writer.start()
    with locked(tmp_path):
        for number in range(200):
            writer.put(tenant(number))
        async with asyncio.timeout(60):
            while writer.available:  # noqa: ASYNC110 - nobody could set an event
                await asyncio.sleep(0.01)
        assert writer.backlog == QUICK.capacity
        assert writer.dropped == 150
    assert await writer.flushed(timeout_s=60)
    assert repairs == [1]
    assert await catalog.tenants() == tuple(tenant(n) for n in range(150, 200))
    await writer.close()


@pytest.mark.parametrize("all_files", [True, False])
async def test_a_file_that_is_removed_is_made_anew_and_filled(
    catalog: Catalog, tmp_path: Path, *, all_files: bool
) -> None:
    """Its connections could write to it for ever, and nobody would see a row."""
    known = [tenant(0)]
    writer = Writer(
        catalog, clock=SystemClock(), limits=QUICK, on_repair=lambda: iter(known)
    )
    writer.start()
    writer.put(tenant(0))
    assert await writer.flushed(timeout_s=60)
    for suffix in ("", "-wal", "-shm") if all_files else ("",):
        (tmp_path / f"catalog.sqlite3{suffix}").unlink()
    writer.put(tenant(1))
    assert await writer.flushed(timeout_s=60)
    await writer.close()
    async with Catalog.open(f"sqlite:///{tmp_path}/catalog.sqlite3") as anew:
        assert await anew.tenants() == (tenant(0), tenant(1))


async def test_a_folder_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    async with Catalog.open(f"sqlite:///{folder}/catalog.sqlite3") as catalog:
        writer = Writer(catalog, clock=SystemClock(), limits=QUICK)
        writer.start()
        writer.put(tenant(0))
        assert await writer.flushed(timeout_s=60)
        shutil.rmtree(folder)
        writer.put(tenant(1))
        assert await writer.flushed(timeout_s=60)
        await writer.close()
        assert await catalog.tenants() == (tenant(1),)


async def test_a_full_disk_is_unavailable_and_nothing_of_the_batch_stays(
    tmp_path: Path,
) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/catalog.sqlite3")
    catalog = Catalog(engine)
    await catalog.migrate()
    async with transaction(engine, writes=False) as connection:
        # the pool hands the same connection out again
        await connection.execute(text("PRAGMA max_page_count = 30"))
    with pytest.raises(CatalogUnavailableError, match="full"):
        await catalog.write([tenant(n, 1000) for n in range(200)])
    assert await catalog.tenants() == ()
    async with transaction(engine, writes=False) as connection:
        await connection.execute(text("PRAGMA max_page_count = 1000000"))
    await catalog.write([tenant(0)])
    assert await catalog.tenants() == (tenant(0),)
    await catalog.close()


async def test_a_file_that_is_no_database_says_so(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite3").write_bytes(b"no database at all" * 100)
    async with Catalog.open(f"sqlite:///{tmp_path}/catalog.sqlite3") as catalog:
        with pytest.raises(CatalogUnavailableError, match="not a database"):
            await catalog.migrate()


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with Catalog.open(f"sqlite:///{tmp_path}/file/c.sqlite3") as catalog:
        with pytest.raises(CatalogUnavailableError, match="folder"):
            await catalog.migrate()


async def test_missing_folders_are_made(tmp_path: Path) -> None:
    async with Catalog.open(catalog_url("", tmp_path / "a" / "b")) as catalog:
        await catalog.migrate()
        await catalog.write([NODE])
    assert (tmp_path / "a" / "b" / "catalog.sqlite3").exists()


async def test_sqlite_runs_with_write_ahead_logging(
    catalog: Catalog, tmp_path: Path
) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/catalog.sqlite3")
    assert await journal_mode(engine, "WAL") == "wal"
    async with transaction(engine, writes=False) as connection:
        mode = await connection.execute(text("PRAGMA journal_mode"))
        assert mode.scalar_one() == "wal"
    await engine.dispose()


@pytest.mark.timeout(240)
async def test_postgres_that_is_killed_and_comes_back() -> None:
    with postgres_server() as server:
        if server.process is None:
            pytest.skip("the given server is not ours to kill")
        url = await server.create_database()
        async with Catalog.open(url) as catalog:
            writer = Writer(catalog, clock=SystemClock(), limits=QUICK)
            writer.start()
            writer.put(NODE)
            assert await writer.flushed(timeout_s=60)
            server.kill()
            for number in range(100):
                writer.put(tenant(number))
            async with asyncio.timeout(60):
                while writer.available:  # noqa: ASYNC110 - nobody could set an event
                    await asyncio.sleep(0.01)
            assert 0 < writer.backlog <= QUICK.capacity
            with pytest.raises(CatalogUnavailableError):
                await catalog.nodes()
            server.restart()
            assert await writer.flushed(timeout_s=60)
            assert len(await catalog.tenants()) == QUICK.capacity
            assert await catalog.nodes() == (NODE,)
            await writer.close()


async def test_nobody_listens_there() -> None:
    async with Catalog.open("postgresql://nobody@127.0.0.1:1/none") as catalog:
        with pytest.raises(CatalogUnavailableError):
            await catalog.migrate()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://a/b", "mysql"),
        ("not a url", "no database URL"),
        ("sqlite://", "file"),
        ("sqlite:///:memory:", "file"),
    ],
)
async def test_bad_urls_are_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Catalog.open(url)
    assert caught.value.key == "catalog"


def test_passwords_are_kept_in_the_url_for_the_driver(tmp_path: Path) -> None:
    url = catalog_url("postgresql://u:s3cret@h/d", tmp_path)
    assert url == "postgresql+asyncpg://u:s3cret@h/d"


async def test_text_that_a_database_cannot_hold_is_refused(catalog: Catalog) -> None:
    with pytest.raises(CatalogRejectedError):
        await catalog.write([TenantRow(TenantId("t"), None, 1.0)])  # pyright: ignore[reportArgumentType]


def test_importing_the_catalog_does_not_import_alembic() -> None:
    code = "import sys, kvtide.catalog; sys.exit('alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603
