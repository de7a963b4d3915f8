"""What was deleted while a store was down: from the catalog, kept for when it is away.

Asked once, before what is on its SSD counts.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from kvtide.catalog import Catalog, CatalogError
from kvtide.kv import tenant_tag
from kvtide.store.ssd.events import DeletedSpace

log = structlog.get_logger("kvtide.store")

ASK_LIMIT_S = 5.0
KEPT = 100_000
_SINCE_REVISION = "0003"
"""The catalog's first that keeps what was removed by tenant or model."""

_Line = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Call it in a thread; it may block for ``ASK_LIMIT_S``, and never raises.

    ``path`` is where they are kept, ``url`` the catalog's.
    """

    path: Path
    url: str
    secret: bytes = field(repr=False)

    def __call__(self) -> Sequence[DeletedSpace]:
        """Blocks of these spaces that were written before their end are not meant."""
        known = _latest(self._kept())
        try:
            found = asyncio.run(self._ask())
        except (CatalogError, TimeoutError, OSError) as error:
            log.warning("deletions_from_file", count=len(known), why=str(error))
        else:
            known = _latest([*known, *found])
            self._keep(known)
        return known

    async def _ask(self) -> list[DeletedSpace]:
        async with asyncio.timeout(ASK_LIMIT_S), Catalog.open(self.url) as catalog:
            revision = await catalog.revision()
            if revision is None:
                return []
            tenants = await catalog.deleted_tenants()
            removed = await catalog.deletions() if revision >= _SINCE_REVISION else ()
        return [
            DeletedSpace(
                tenant_tag(self.secret, row.tenant), None, _ms(row.deleted_at_s or 0.0)
            )
            for row in tenants
        ] + [
            DeletedSpace(
                row.tenant_tag or None, row.model_tag or None, _ms(row.until_s)
            )
            for row in removed
            # nobody means everything
            if row.tenant_tag or row.model_tag
        ]

    def _kept(self) -> list[DeletedSpace]:
        try:
            lines = msgspec.json.decode(self.path.read_bytes(), type=list[_Line])
            return [
                DeletedSpace(
                    bytes.fromhex(tenant) or None,
                    bytes.fromhex(model) or None,
                    until_ms,
                )
                for tenant, model, until_ms in lines
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            log.warning("tombstones_unreadable", path=str(self.path), error=str(error))
            return []

    def _keep(self, known: list[DeletedSpace]) -> None:
        newest = sorted(known, key=lambda each: -each.until_ms)[:KEPT]
        lines = [
            ((each.tenant or b"").hex(), (each.model or b"").hex(), each.until_ms)
            for each in newest
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(lines))
            fresh.replace(self.path)
        except OSError as error:
            log.warning("tombstones_not_kept", path=str(self.path), error=str(error))


def _latest(spaces: Iterable[DeletedSpace]) -> list[DeletedSpace]:
    """Of several that say the same the latest counts."""
    ends = sorted(spaces, key=lambda each: each.until_ms)
    return list({(each.tenant, each.model): each for each in ends}.values())


def _ms(seconds: float) -> int:
    return int(seconds * 1e3)
