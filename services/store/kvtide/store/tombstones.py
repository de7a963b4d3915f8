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
from kvtide.kv import BlockKey, tenant_tag
from kvtide.store.ssd.events import DeletedSpace, RemovedBlock, Tombstone

log = structlog.get_logger("kvtide.store")

ASK_LIMIT_S = 5.0
KEPT = 100_000
_SINCE_REVISION = "0003"
"""The catalog's first that keeps what was removed by tenant or model."""

_KEYS_SINCE_REVISION = "0005"
"""And of single blocks."""

_Line = tuple[str, str, int]


class _Lines(msgspec.Struct, frozen=True):
    """The file. ``spaces`` are tags of tenant and model, and when; ``keys`` of blocks."""

    spaces: list[_Line]
    keys: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Read:
    """What was known when it was asked for; ``whole``: the catalog has answered."""

    known: tuple[Tombstone, ...]
    whole: bool


@dataclass(slots=True)
class Tombstones:
    """Call it in a thread; it may block for ``ASK_LIMIT_S``, and never raises.

    ``path`` is where they are kept, ``url`` the catalog's. ``first`` is what the first
    call has read.
    """

    path: Path
    url: str
    secret: bytes = field(repr=False)
    first: Read | None = field(default=None, init=False)

    def __call__(self) -> Sequence[Tombstone]:
        """Blocks of these spaces, and these blocks, that were written before their end are not meant."""
        known, whole = _latest(self._kept()), False
        try:
            found = asyncio.run(self._ask())
        except (CatalogError, TimeoutError, OSError) as error:
            log.warning("deletions_from_file", count=len(known), why=str(error))
        else:
            known, whole = _latest([*known, *found]), True
            self._keep(known)
        if self.first is None:
            self.first = Read(tuple(known), whole)
        return known

    def since(self, since_s: float) -> list[Tombstone]:
        """What the catalog has of then, in seconds of wall clock, or later.

        Raises:
            CatalogError, TimeoutError, OSError: it does not answer in ``ASK_LIMIT_S``.
        """
        return asyncio.run(self._ask(since_s))

    async def _ask(self, since_s: float = 0.0) -> list[Tombstone]:
        async with asyncio.timeout(ASK_LIMIT_S), Catalog.open(self.url) as catalog:
            revision = await catalog.revision()
            if revision is None:
                return []
            tenants = await catalog.deleted_tenants(since_s=since_s)
            removed, blocks = (), ()
            if revision >= _SINCE_REVISION:
                removed = await catalog.deletions(since_s=since_s)
            if revision >= _KEYS_SINCE_REVISION:
                blocks = await catalog.removed_blocks(since_s=since_s)
        spaces = [
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
        return [*spaces, *(RemovedBlock(row.key, _ms(row.until_s)) for row in blocks)]

    def _kept(self) -> list[Tombstone]:
        try:
            # a list of spaces alone is of before there were keys
            found = msgspec.json.decode(
                self.path.read_bytes(), type=_Lines | list[_Line]
            )
            lines = found if isinstance(found, _Lines) else _Lines(found, [])
            spaces = [
                DeletedSpace(
                    bytes.fromhex(tenant) or None,
                    bytes.fromhex(model) or None,
                    until_ms,
                )
                for tenant, model, until_ms in lines.spaces
            ]
            keys = [
                RemovedBlock(BlockKey(bytes.fromhex(key)), until_ms)
                for key, until_ms in lines.keys
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            log.warning("tombstones_unreadable", path=str(self.path), error=str(error))
            return []
        return [*spaces, *keys]

    def _keep(self, known: list[Tombstone]) -> None:
        newest = sorted(known, key=lambda each: -each.until_ms)
        spaces = [each for each in newest if isinstance(each, DeletedSpace)][:KEPT]
        keys = [each for each in newest if isinstance(each, RemovedBlock)][:KEPT]
        lines = _Lines(
            [
                ((each.tenant or b"").hex(), (each.model or b"").hex(), each.until_ms)
                for each in spaces
            ],
            [(each.key.hex(), each.until_ms) for each in keys],
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(lines))
            fresh.replace(self.path)
        except OSError as error:
            log.warning("tombstones_not_kept", path=str(self.path), error=str(error))


def _latest(tombstones: Iterable[Tombstone]) -> list[Tombstone]:
    """Of several that say the same the latest counts."""
    ends = sorted(tombstones, key=lambda each: each.until_ms)
    return list({_meant(each): each for each in ends}.values())


def _meant(tombstone: Tombstone) -> tuple[object, ...]:
    match tombstone:
        case DeletedSpace(tenant, model, _):
            return tenant, model
        case RemovedBlock(key, _):
            return (key,)


def _ms(seconds: float) -> int:
    return int(seconds * 1e3)
