"""Tenants' keys for the SSD tier: wrapped in the catalog, plain in memory only.

Nothing of them is kept on the store's own disk: a key that is destroyed in the catalog
is gone for a store that was down, whatever its disk still has. So the tier stays shut
while the catalog is away when a store starts; it is tried again.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

import structlog

from kvtide.catalog import Catalog, CatalogError, TenantKeyRow
from kvtide.runtime import Clock, ConfigError
from kvtide.store.key_encryption import KeyEncryptionKey, NotUnwrappedError
from kvtide.store.ssd.directory import wrapped_otherwise, wrapping_of
from kvtide.store.ssd.errors import KeysAwayError, LockedError
from kvtide.store.ssd.sealing import KEY_ID_BYTES, SECRET_BYTES, TenantKey

log = structlog.get_logger("kvtide.store")

ASK_LIMIT_S = 5.0
"""How long the catalog is asked for when the tier opens."""
ASK_ONE_S = 1.0
"""For one tenant's key: meanwhile the only thread that writes does nothing else."""
AGAIN_S = 30.0
"""So long after the catalog failed nobody asks it for a new tenant's key."""

_PURPOSE = b"kvtide tenant key"

T = TypeVar("T")


class CatalogKeys:
    """``TenantKeys`` over a catalog. Called in threads, which may wait for it."""

    def __init__(self, url: str, kek: KeyEncryptionKey, clock: Clock) -> None:
        """Nothing is asked yet."""
        self._url = url
        self._kek = kek
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._by_tenant: dict[bytes, TenantKey] = {}
        self._by_id: dict[bytes, TenantKey] = {}
        self._again_s = float("-inf")

    def open(self) -> str:
        """See ``TenantKeys``."""
        try:
            rows = _run(self._rows())
        except (CatalogError, TimeoutError, OSError) as error:
            raise KeysAwayError(
                "the tenants' keys are in the catalog, and that does not answer: "
                f"{error or 'no answer in time'}"
            ) from error
        try:
            keys = [self._unwrapped(row) for row in rows if row.wrapped]
        except NotUnwrappedError:
            raise KeysAwayError(wrapped_in_catalog(self._kek)) from None
        with self._lock:
            self._by_tenant = {key.tenant: key for key in keys}
            self._by_id = {key.key_id: key for key in keys}
        return self._kek.id

    def of_tenant(self, tenant: bytes) -> TenantKey:
        """See ``TenantKeys``."""
        known = self._known(tenant)
        if known is not None:
            return known
        # reads of what is known never wait for the catalog
        with self._asking:
            known = self._known(tenant)
            if known is None:
                known = self._ask(tenant)
                with self._lock:
                    self._by_tenant[tenant] = self._by_id[known.key_id] = known
            return known

    def of_id(self, key_id: bytes) -> TenantKey:
        """See ``TenantKeys``."""
        with self._lock:
            known = self._by_id.get(key_id)
        if known is None:
            raise LockedError("its tenant's key is destroyed, or was never here")
        return known

    def forget(self, tenant: bytes) -> None:
        """See ``TenantKeys``."""
        with self._lock:
            known = self._by_tenant.pop(tenant, None)
            if known is not None:
                del self._by_id[known.key_id]

    # ---- inside

    def _known(self, tenant: bytes) -> TenantKey | None:
        with self._lock:
            return self._by_tenant.get(tenant)

    def _ask(self, tenant: bytes) -> TenantKey:
        """The tenant's key from the catalog, made if it never had one."""
        if self._clock.monotonic() < self._again_s:
            raise LockedError("the catalog, which has the tenants' keys, is away")
        key_id = os.urandom(KEY_ID_BYTES)
        wrapped = self._kek.wrap(os.urandom(SECRET_BYTES), _purpose(tenant, key_id))
        made_at_s = self._clock.wall()
        row = TenantKeyRow(tenant, key_id, self._kek.id, wrapped, made_at_s)
        try:
            found = _run(self._add(row))
        except (CatalogError, TimeoutError, OSError) as error:
            self._again_s = self._clock.monotonic() + AGAIN_S
            log.warning("tenant_key_not_had", why=str(error), again_s=AGAIN_S)
            raise LockedError(
                "the catalog has the tenants' keys, and is away"
            ) from error
        if not found.wrapped:
            raise LockedError("the tenant's key is destroyed")
        try:
            return self._unwrapped(found)
        except NotUnwrappedError:
            raise LockedError(wrapped_in_catalog(self._kek)) from None

    def _unwrapped(self, row: TenantKeyRow) -> TenantKey:
        purpose = _purpose(row.tenant_tag, row.key_id)
        secret = self._kek.unwrap(row.wrapped, purpose)
        return TenantKey(row.tenant_tag, row.key_id, secret)

    async def _rows(self) -> tuple[TenantKeyRow, ...]:
        async with asyncio.timeout(ASK_LIMIT_S), Catalog.open(self._url) as catalog:
            await catalog.migrate()
            return await catalog.tenant_keys()

    async def _add(self, row: TenantKeyRow) -> TenantKeyRow:
        async with asyncio.timeout(ASK_ONE_S), Catalog.open(self._url) as catalog:
            await catalog.migrate()
            return await catalog.add_tenant_key(row)


def check_start(path: Path, kek: KeyEncryptionKey | None) -> None:
    """Refuse to start over blocks that can't be read with this key, or without any.

    Raises:
        ConfigError: they are encrypted otherwise.
    """
    try:
        known = wrapping_of(path)
    except OSError:
        return  # whether it can be used at all is found out when it is opened
    if known is None or (kek is not None and kek.id == known):
        return
    if kek is None:
        raise ConfigError(
            f"the blocks in {path} are encrypted: give the key that they were written "
            "with (ssd_key_file), or remove the directory",
            key="ssd_key_file",
        )
    raise ConfigError(wrapped_otherwise(path), key="ssd_key_file")


async def check_catalog(url: str, kek: KeyEncryptionKey) -> None:
    """Refuse to start with another key than the tenants' keys are wrapped with.

    A catalog that is away now is no obstacle.

    Raises:
        ConfigError: they are wrapped with another.
    """
    try:
        async with asyncio.timeout(ASK_LIMIT_S), Catalog.open(url) as catalog:
            await catalog.migrate()
            rows = await catalog.tenant_keys()
    except (CatalogError, TimeoutError, OSError) as error:
        log.warning("tenant_keys_not_checked", why=str(error))
        return
    if any(row.wrapped and row.kek_id != kek.id for row in rows):
        raise ConfigError(wrapped_in_catalog(kek), key="ssd_key_file")


def wrapped_in_catalog(kek: KeyEncryptionKey) -> str:
    """What is wrong with the key-encryption key, for people."""
    return (
        "the tenants' keys in the catalog are wrapped with another key than this one "
        f"({kek.id}): all stores of a cluster need the same (ssd_key_file)"
    )


def _purpose(tenant: bytes, key_id: bytes) -> bytes:
    return _PURPOSE + tenant + key_id


def _run(work: Coroutine[object, object, T]) -> T:
    """In a thread without a loop of its own."""
    return asyncio.run(work)
