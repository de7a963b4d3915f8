"""Tenants that were deleted: from the catalog, and kept for when that is away.

A store that was down did not hear of it. Asked once, before what is on its SSD counts.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from kvtide.catalog import Catalog, CatalogError
from kvtide.kv import TenantId, tenant_tag
from kvtide.store.ssd.events import DeletedSpace

log = structlog.get_logger("kvtide.store")

ASK_LIMIT_S = 5.0
KEPT = 100_000


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Call it in a thread; it may block for ``ASK_LIMIT_S``, and never raises.

    ``path`` is where they are kept, ``url`` the catalog's.
    """

    path: Path
    url: str
    secret: bytes = field(repr=False)

    def __call__(self) -> Sequence[DeletedSpace]:
        """Blocks of these tenants that were written before their end are not meant."""
        known = self._kept()
        try:
            found = asyncio.run(self._ask())
        except (CatalogError, TimeoutError, OSError) as error:
            log.warning("deleted_tenants_from_file", count=len(known), why=str(error))
        else:
            known |= found
            self._keep(known)
        return [
            DeletedSpace(
                tenant_tag(self.secret, TenantId(tenant)), None, int(deleted_s * 1e3)
            )
            for tenant, deleted_s in known.items()
        ]

    async def _ask(self) -> dict[str, float]:
        async with asyncio.timeout(ASK_LIMIT_S), Catalog.open(self.url) as catalog:
            if await catalog.revision() is None:
                return {}
            rows = await catalog.deleted_tenants()
        return {row.tenant: row.deleted_at_s or 0.0 for row in rows}

    def _kept(self) -> dict[str, float]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("tombstones_unreadable", path=str(self.path), error=str(error))
            return {}

    def _keep(self, known: dict[str, float]) -> None:
        newest = sorted(known.items(), key=lambda item: -item[1])[:KEPT]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(dict(newest)))
            fresh.replace(self.path)
        except OSError as error:
            log.warning("tombstones_not_kept", path=str(self.path), error=str(error))
