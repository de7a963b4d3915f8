"""What was deleted while a store was down: told by the catalog, else by its own file."""

import asyncio
from pathlib import Path

from tests.integration.pool_world import SECRET

from kvtide.catalog import (
    Catalog,
    DeletionRow,
    RemovedBlockRow,
    TenantRow,
    migrate,
)
from kvtide.kv import BlockKey, TenantId, tenant_tag
from kvtide.store.ssd.events import DeletedSpace, RemovedBlock
from kvtide.store.tombstones import Read, Tombstones


def space(tenant: str, until_ms: int) -> DeletedSpace:
    return DeletedSpace(tenant_tag(SECRET, TenantId(tenant)), None, until_ms)


def write(url: str, *rows: TenantRow | DeletionRow | RemovedBlockRow) -> None:
    async def work() -> None:
        await migrate(url)
        async with Catalog.open(url) as catalog:
            await catalog.write(rows)

    asyncio.run(work())


def test_they_are_remembered_when_the_catalog_is_away(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/catalog.sqlite3"
    kept = tmp_path / "state" / "deleted.json"
    ask = Tombstones(kept, url, SECRET)
    assert ask() == []
    gone = TenantRow(TenantId("gone"), "Gone", 1.0, deleted_at_s=50.5)
    write(url, gone, TenantRow(TenantId("here"), "Here", 1.0))
    assert ask() == [space("gone", 50_500)]
    away = Tombstones(kept, "postgresql+asyncpg://nobody@127.0.0.1:1/none", SECRET)
    assert away() == [space("gone", 50_500)]
    # a store holds what is found later against what its SSD was opened by
    assert away.first == Read((space("gone", 50_500),), whole=False)
    assert ask.first == Read((), whole=True)
    # what the catalog has pruned is not forgotten here
    (tmp_path / "catalog.sqlite3").unlink()
    write(url, TenantRow(TenantId("later"), "Later", 1.0, deleted_at_s=60.0))
    assert set(ask()) == {space("gone", 50_500), space("later", 60_000)}


def test_a_spoilt_file_is_said_and_no_obstacle(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/catalog.sqlite3"
    kept = tmp_path / "deleted.json"
    kept.write_text("[no")
    write(url, TenantRow(TenantId("gone"), "Gone", 1.0, deleted_at_s=2.0))
    assert Tombstones(kept, url, SECRET)() == [space("gone", 2000)]
    assert Tombstones(kept, url, SECRET)() == [space("gone", 2000)]


def test_what_people_removed_is_told_and_its_latest_time_counts(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/catalog.sqlite3"
    kept = tmp_path / "deleted.json"
    ask = Tombstones(kept, url, SECRET)
    mine, model = tenant_tag(SECRET, TenantId("gone")), b"m" * 16
    write(url, DeletionRow(mine, b"", 3.0), DeletionRow(b"", model, 4.0))
    write(url, TenantRow(TenantId("gone"), "Gone", 1.0, deleted_at_s=2.0))
    there = {space("gone", 3000), DeletedSpace(None, model, 4000)}
    assert set(ask()) == there
    write(url, DeletionRow(mine, model, 5.0), DeletionRow(b"", b"", 9.0))
    there.add(DeletedSpace(mine, model, 5000))
    assert set(ask()) == there
    away = Tombstones(kept, "postgresql+asyncpg://nobody@127.0.0.1:1/none", SECRET)
    assert set(away()) == there


def test_single_blocks_are_told_too_and_remembered(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/catalog.sqlite3"
    kept = tmp_path / "deleted.json"
    key, other = BlockKey(b"k" * 16), BlockKey(b"o" * 16)
    mine = tenant_tag(SECRET, TenantId("gone"))
    kept.write_text(f'[["{mine.hex()}", "", 7]]')  # as it was before there were keys
    write(url, RemovedBlockRow(key, 3.0), RemovedBlockRow(other, 4.0))
    write(url, RemovedBlockRow(key, 5.0))
    there = {space("gone", 7), RemovedBlock(key, 5000), RemovedBlock(other, 4000)}
    assert set(Tombstones(kept, url, SECRET)()) == there
    away = Tombstones(kept, "postgresql+asyncpg://nobody@127.0.0.1:1/none", SECRET)
    assert set(away()) == there
