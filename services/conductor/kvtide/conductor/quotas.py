"""Follows what the catalog says that tenants may use."""

from collections.abc import Callable, Iterable, Mapping

import structlog

from kvtide.catalog import Catalog, CatalogError, QuotaRow
from kvtide.conductor.quota import TenantQuota
from kvtide.kv import TenantId
from kvtide.runtime import Clock

_log = structlog.get_logger("kvtide.conductor")


async def follow_quotas(
    catalog: Catalog,
    take: Callable[[Mapping[TenantId, TenantQuota]], None],
    clock: Clock,
    *,
    every_s: float,
) -> None:
    """Tell ``take`` now and then; what was told last holds while the catalog is down."""
    while True:
        try:
            take(quotas_of(await catalog.quotas()))
        except CatalogError as error:
            _log.info("quotas_not_read", why=str(error))
        await clock.sleep(every_s)


def quotas_of(rows: Iterable[QuotaRow]) -> dict[TenantId, TenantQuota]:
    """Those rows as a conductor takes them."""
    return {
        row.tenant: TenantQuota(
            row.requests_per_min, row.tokens_per_min, row.concurrent_requests
        )
        for row in rows
    }
