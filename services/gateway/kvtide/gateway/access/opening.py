"""The parts of access that a gateway process opens, and ends."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kvtide.catalog import Catalog, Writer, catalog_url
from kvtide.gateway.access.audit import AuditBook
from kvtide.gateway.access.caller import Caller
from kvtide.gateway.access.key_follower import CatalogAccess, KeyFollower
from kvtide.gateway.access.keyring import KeyRules
from kvtide.gateway.settings import GatewaySettings
from kvtide.kv import TenantId
from kvtide.runtime import Clock, TaskScope


@dataclass(frozen=True, slots=True)
class AccessDesk:
    """Keys, the audit log, and the catalog that both are kept in."""

    keys: KeyFollower
    audit: AuditBook
    catalog: Catalog


@asynccontextmanager
async def open_access(
    settings: GatewaySettings, *, clock: Clock, registry: CollectorRegistry
) -> AsyncGenerator[AccessDesk]:
    """Read who may ask, and follow it until the end. Serves without its catalog.

    Raises:
        ConfigError: the catalog's URL can't be used.
    """
    url = catalog_url(settings.catalog, settings.state_dir)
    rules = KeyRules(
        mode=settings.auth,
        default=Caller(TenantId(settings.tenant)),
        max_age_s=settings.keys_max_age_s,
        fresh_s=5 * settings.keys_refresh_s,
    )
    async with Catalog.open(url) as catalog, TaskScope() as tasks:
        writer = Writer(catalog, clock=clock)
        writer.register(registry, "gateway")
        writer.start()
        keys = KeyFollower(
            CatalogAccess(catalog, url),
            rules,
            clock=clock,
            registry=registry,
            refresh_s=settings.keys_refresh_s,
        )
        try:
            await keys.start()
            tasks.spawn(keys.run(), name="keys")
            yield AccessDesk(keys, AuditBook(writer, clock), catalog)
        finally:
            await tasks.close()
            await writer.close()
