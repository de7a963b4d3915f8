"""Tenants' keys in a real catalog: made once, wrapped, and gone when a tenant is deleted."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.integration.pool_world import SECRET
from tests.unit.ssd_driver import NODE, SMALL, SsdDriver, key_of, part_of, tags_of
from tests.unit.test_ssd_tier import rules

from kvtide.catalog import (
    Catalog,
    Limits,
    Tenancy,
    migrate,
)
from kvtide.kv import BlockKey, TenantId, tenant_tag
from kvtide.runtime import ConfigError, ManualClock, SystemClock
from kvtide.store.key_encryption import KeyEncryptionKey
from kvtide.store.ssd.errors import KeysAwayError, LockedError
from kvtide.store.ssd.files import FilesSpec, TierFiles
from kvtide.store.ssd.format import FRAME_BYTES, Envelope
from kvtide.store.ssd.health import TierState
from kvtide.store.tenant_keys import CatalogKeys, check_catalog
from kvtide.store.tombstones import Tombstones

KEK = KeyEncryptionKey(b"k" * 32)
TAG = tenant_tag(SECRET, TenantId("acme"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite+aiosqlite:///{tmp_path}/catalog.sqlite3"
    asyncio.run(migrate(made))
    return made


def keys_at(url: str, kek: KeyEncryptionKey = KEK) -> CatalogKeys:
    return CatalogKeys(url, kek, ManualClock())


def wrapped_of(url: str) -> dict[bytes, bytes]:
    async def work() -> dict[bytes, bytes]:
        async with Catalog.open(url) as catalog:
            rows = await catalog.tenant_keys()
        return {row.tenant_tag: row.wrapped for row in rows}

    return asyncio.run(work())


def delete(url: str, name: str, tag: bytes) -> None:
    async def work() -> None:
        async with Catalog.open(url) as catalog:
            tenancy = Tenancy(catalog, SystemClock(), "test:me")
            await tenancy.add_tenant(name, title="", share="", limits=Limits())
            await tenancy.delete_tenant(name, tag)

    asyncio.run(work())


def files_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_all_stores_get_the_key_that_was_made_first_and_nothing_shows_it(
    url: str, tmp_path: Path
) -> None:
    one, two = keys_at(url), keys_at(url)
    assert one.open() == KEK.id
    made = one.of_tenant(TAG)
    assert two.of_tenant(TAG) == made
    assert one.of_tenant(b"o" * 16).secret != made.secret
    later = keys_at(url)
    later.open()
    assert later.of_id(made.key_id) == made
    there = files_of(tmp_path)
    assert wrapped_of(url)[TAG] in there
    assert made.secret not in there
    assert KEK.secret not in there


def test_a_deleted_tenants_key_is_in_no_file_and_never_made_anew(
    url: str, tmp_path: Path
) -> None:
    keys = keys_at(url)
    made = keys.of_tenant(TAG)
    wrapped = wrapped_of(url)[TAG]
    delete(url, "acme", TAG)
    delete(url, "never-seen", b"n" * 16)
    assert wrapped_of(url) == {TAG: b"", b"n" * 16: b""}
    assert wrapped not in files_of(tmp_path)
    keys.forget(TAG)
    for tag in (TAG, b"n" * 16):
        with pytest.raises(LockedError, match="destroyed"):
            keys.of_tenant(tag)
    with pytest.raises(LockedError):
        keys.of_id(made.key_id)


def test_another_wrapping_key_is_refused_when_a_store_starts(url: str) -> None:
    keys_at(url).of_tenant(TAG)
    other = KeyEncryptionKey(b"o" * 32)
    with pytest.raises(KeysAwayError, match="wrapped with another key"):
        keys_at(url, other).open()
    with pytest.raises(ConfigError, match="wrapped with another key"):
        asyncio.run(check_catalog(url, other))
    asyncio.run(check_catalog(url, KEK))


def test_a_catalog_that_is_away_is_said_and_not_asked_for_each_block() -> None:
    nowhere = "postgresql+asyncpg://nobody@127.0.0.1:1/none"
    keys = keys_at(nowhere)
    with pytest.raises(KeysAwayError, match="does not answer"):
        keys.open()
    with pytest.raises(LockedError):
        keys.of_tenant(TAG)
    with pytest.raises(LockedError) as again:
        keys.of_tenant(TAG)
    assert again.value.__cause__ is None  # it was not asked
    asyncio.run(check_catalog(nowhere, KEK))


class CatalogDriver(SsdDriver):
    """A store's machine and files with keys and deletions from a catalog."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        super().__init__(folder / "ssd", rules(sealed=True))

    def make_files(self) -> TierFiles:
        spec = FilesSpec(
            self.path,
            NODE,
            key_id=7,
            deleted=Tombstones(self.folder / "kept.json", self.url, SECRET),
            keys=CatalogKeys(self.url, KEK, SystemClock()),
        )
        return TierFiles(spec, self.arena, SystemClock())


def test_a_store_that_was_down_serves_nothing_of_a_deleted_tenant_nor_can_it(
    url: str, tmp_path: Path
) -> None:
    store = CatalogDriver(tmp_path / "store", url)
    for number in range(1, 30):
        store.put([key_of(number)], tenant=number % 2)
        store.quiet()
    had = there(store, range(1, 30))
    theirs = [key for key in had if key[-1] % 2]
    assert 0 < len(theirs) < len(had)
    places = {key: store.place(key) for key in theirs}
    store.stop()
    # while it is down its disk keeps all; only the catalog changes
    on_disk = files_of(store.path)
    secret = keys_at(url).of_tenant(tags_of(1).tenant)
    delete(url, "acme", tags_of(1).tenant)
    assert files_of(store.path) == on_disk
    store.start()
    assert store.machine.ssd.health.state is TierState.READY
    assert there(store, range(1, 30)) == [key for key in had if key not in theirs]
    assert store.read(theirs) == [False] * len(theirs)
    store.stop()
    nothing_opens(store, url, [secret.key_id], places.keys())


def nothing_opens(
    store: CatalogDriver, url: str, key_ids: list[bytes], keys: Iterable[BlockKey]
) -> None:
    """The bytes are there still; with all that is left no key for them is to be had."""
    raw = files_of(store.path)
    sealed = {
        Envelope.decode(raw[at + FRAME_BYTES :]).key_id
        for at in range(0, len(raw) - FRAME_BYTES, 4096)
        if raw[at + 8 : at + 12] == b"KVTR"
    }
    assert set(key_ids) <= sealed
    left = keys_at(url)
    left.open()
    for key_id in key_ids:
        with pytest.raises(LockedError):
            left.of_id(key_id)
    everything = files_of(store.folder)
    for key in keys:
        assert part_of(key, 0, SMALL) not in everything


def there(store: SsdDriver, numbers: Iterable[int]) -> list[BlockKey]:
    return [key_of(n) for n in numbers if store.on_ssd(key_of(n))]
