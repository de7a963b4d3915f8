"""The catalog: typed records in and out of SQLite or PostgreSQL.

Nothing here is for a serving step to wait on: roles write through ``Writer``.
"""

from collections.abc import Sequence
from itertools import groupby
from types import TracebackType
from typing import Self

from sqlalchemy import Executable, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from kvtide.catalog.access_queries import AuditQuery, read_access, select_audit
from kvtide.catalog.database import open_engine, transaction
from kvtide.catalog.migrate import migrate_engine, revision
from kvtide.catalog.pruning import Cutoffs, prune
from kvtide.catalog.queries import (
    MAX_PAGE,
    BlockCount,
    BlockQuery,
    HitQuery,
    HitRate,
    RemovalCount,
    RemovalQuery,
    TenantHits,
    count_removals,
    hit_rate,
    removal_count,
    removal_row,
    select_blocks,
    select_hit_rates,
    select_removals,
    select_tenant_hits,
    tenant_hits,
)
from kvtide.catalog.records import (
    Access,
    ApiKeyRow,
    AuditRow,
    BlockRow,
    Change,
    DecisionRow,
    DeletionRow,
    NodeRow,
    QuotaRow,
    RemovalRow,
    RemovedBlockRow,
    RequestRow,
    TenantKeyRow,
    TenantRow,
)
from kvtide.catalog.rows import (
    Values,
    api_key_row,
    block_row,
    decision_row,
    node_row,
    request_row,
)
from kvtide.catalog.tables import (
    access,
    api_keys,
    blocks,
    decisions,
    deletions,
    nodes,
    quotas,
    removed_blocks,
    requests,
    tenant_keys,
    tenants,
)
from kvtide.catalog.tenant_keys import add_tenant_key, scrub, scrubbing
from kvtide.catalog.writing import in_groups, write_group
from kvtide.kv import (
    BlockKey,
    RequestId,
    TenantId,
    Tier,
    name_prefix,
)

MOST_REMOVED = 100_000


class Catalog:
    """One database. Safe for concurrent use by the tasks of one event loop.

    Every method raises ``CatalogUnavailableError`` when the database is down, locked,
    full or slow, and ``CatalogRejectedError`` when it refuses the values for ever.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Take an engine that ``open_engine`` made; ``close`` disposes of it."""
        self._engine = engine

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the catalog at ``url``; nothing is connected or migrated yet.

        Raises:
            ConfigError: the URL is wrong or the driver is missing.
        """
        return cls(open_engine(url))

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def __aenter__(self) -> Self:
        """Enter; see ``open``."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    async def migrate(self) -> None:
        """Bring the schema up to date.

        Raises:
            CatalogRevisionError: it is newer than this program.
        """
        await migrate_engine(self._engine)

    async def revision(self) -> str | None:
        """The schema's revision; None when nothing was ever migrated."""
        return await revision(self._engine)

    async def write(self, changes: Sequence[Change]) -> None:
        """Write all of them in order, in one transaction, or none."""
        destroys = any(isinstance(change, TenantKeyRow) for change in changes)
        async with transaction(self._engine, writes=True) as connection:
            if destroys:
                await scrubbing(connection)
            for kind, group in groupby(in_groups(changes), key=type):
                await write_group(connection, kind, tuple(group))
        if destroys:
            await scrub(self._engine)

    async def nodes(self) -> tuple[NodeRow, ...]:
        """All nodes that were ever seen, by name."""
        rows = await self._rows(select(nodes).order_by(nodes.c.node))
        return tuple(node_row(row) for row in rows)

    async def blocks(self, query: BlockQuery) -> tuple[BlockRow, ...]:
        """One page of block rows, in the query's order."""
        return tuple(block_row(row) for row in await self._rows(select_blocks(query)))

    async def block_counts(self) -> tuple[BlockCount, ...]:
        """Copies and bytes by store and tier."""
        statement = (
            select(
                blocks.c.node,
                blocks.c.tier,
                func.count().label("blocks"),
                func.sum(blocks.c.length).label("bytes"),
            )
            .group_by(blocks.c.node, blocks.c.tier)
            .order_by(blocks.c.node, blocks.c.tier)
        )
        return tuple(
            BlockCount(
                node=row["node"],
                tier=Tier(row["tier"]),
                blocks=row["blocks"],
                bytes=int(row["bytes"]),
            )
            for row in await self._rows(statement)
        )

    async def decisions(self, request: RequestId) -> tuple[DecisionRow, ...]:
        """All decisions on one request, by attempt."""
        statement = select(decisions).where(decisions.c.request == request)
        rows = await self._rows(statement.order_by(decisions.c.attempt))
        return tuple(decision_row(row) for row in rows)

    async def find_request(self, asked: str) -> RequestId | None:
        """The request of that name, or the newest that a client called so.

        Only requests that were decided on are found; reads the whole table.
        """
        prefix = name_prefix(asked)
        exact = decisions.c.request == asked
        begins = func.substr(decisions.c.request, 1, len(prefix)) == prefix
        statement = (
            select(decisions.c.request)
            .where(exact | begins)
            .order_by(exact.desc(), decisions.c.decided_at_s.desc())
            .limit(1)
        )
        rows = await self._rows(statement)
        return RequestId(rows[0]["request"]) if rows else None

    async def recent_decisions(self, limit: int) -> tuple[DecisionRow, ...]:
        """The newest decisions, newest first."""
        order = (decisions.c.decided_at_s.desc(), decisions.c.request)
        statement = select(decisions).order_by(*order).limit(min(limit, MAX_PAGE))
        return tuple(decision_row(row) for row in await self._rows(statement))

    async def request(self, request: RequestId) -> RequestRow | None:
        """How a request ended; None when it did not or is not known."""
        rows = await self._rows(select(requests).where(requests.c.request == request))
        return request_row(rows[0]) if rows else None

    async def recent_requests(
        self, limit: int, *, tenant: TenantId | None = None
    ) -> tuple[RequestRow, ...]:
        """The requests that ended last, newest first."""
        statement = select(requests).limit(min(limit, MAX_PAGE))
        if tenant is not None:
            statement = statement.where(requests.c.tenant == tenant)
        order = (requests.c.ended_at_s.desc(), requests.c.request)
        rows = await self._rows(statement.order_by(*order))
        return tuple(request_row(row) for row in rows)

    async def tenants(self) -> tuple[TenantRow, ...]:
        """All tenants, deleted ones too."""
        rows = await self._rows(select(tenants).order_by(tenants.c.tenant))
        return tuple(TenantRow(**row) for row in rows)

    async def api_keys(self) -> tuple[ApiKeyRow, ...]:
        """All keys, revoked ones too, by hash."""
        rows = await self._rows(select(api_keys).order_by(api_keys.c.key_hash))
        return tuple(api_key_row(row) for row in rows)

    async def quotas(self) -> tuple[QuotaRow, ...]:
        """All tenants' limits."""
        rows = await self._rows(select(quotas).order_by(quotas.c.tenant))
        return tuple(QuotaRow(**row) for row in rows)

    async def access_revision(self) -> int:
        """Grows with each change of a tenant, a key or a quota."""
        rows = await self._rows(select(access.c.revision))
        return int(rows[0]["revision"]) if rows else 0

    async def access(self) -> Access:
        """Who may ask, all of one moment."""
        async with transaction(self._engine, writes=False) as connection:
            return await read_access(connection)

    async def audit(self, query: AuditQuery) -> tuple[AuditRow, ...]:
        """What was done, the newest first."""
        rows = await self._rows(select_audit(query))
        return tuple(AuditRow(**row) for row in rows)

    async def prune(self, before: Cutoffs) -> int:
        """Delete what is too old, a bounded piece at a time; returns how many rows."""
        return await prune(self._engine, before)

    async def hit_rates(self, query: HitQuery) -> tuple[HitRate, ...]:
        """What requests found cached, by the time when they ended."""
        rows = await self._rows(select_hit_rates(query))
        return tuple(hit_rate(row, query.step_s) for row in rows)

    async def tenant_hits(
        self, query: HitQuery, *, most: int = 6
    ) -> tuple[TenantHits, ...]:
        """The same by tenant, for the ``most`` of them with the longest prompts."""
        rows = await self._rows(select_tenant_hits(query, most))
        return tuple(tenant_hits(row, query.step_s) for row in rows)

    async def removals(self, query: RemovalQuery) -> tuple[RemovalRow, ...]:
        """Copies that went, the newest first."""
        rows = await self._rows(select_removals(query))
        return tuple(removal_row(row) for row in rows)

    async def removal_counts(self, *, since_s: float) -> tuple[RemovalCount, ...]:
        """How many copies went since then, by store, tier and reason."""
        rows = await self._rows(count_removals(since_s))
        return tuple(removal_count(row) for row in rows)

    async def deleted_tenants(self, *, since_s: float = 0.0) -> tuple[TenantRow, ...]:
        """Tenants that were deleted at or after ``since_s``, the earliest first."""
        statement = (
            select(tenants)
            .where(tenants.c.deleted_at_s >= since_s)
            .order_by(tenants.c.deleted_at_s, tenants.c.tenant)
        )
        return tuple(TenantRow(**row) for row in await self._rows(statement))

    async def deletions(self, *, since_s: float = 0.0) -> tuple[DeletionRow, ...]:
        """What people removed by tenant or model since then, the latest last."""
        order = (deletions.c.until_s, deletions.c.tenant_tag, deletions.c.model_tag)
        rows = await self._rows(
            select(deletions).where(deletions.c.until_s >= since_s).order_by(*order)
        )
        return tuple(DeletionRow(**row) for row in rows)

    async def removed_blocks(
        self, limit: int = MOST_REMOVED, *, since_s: float = 0.0
    ) -> tuple[RemovedBlockRow, ...]:
        """Single blocks that people removed, the latest last; the latest ``limit``."""
        order = (removed_blocks.c.until_s.desc(), removed_blocks.c.key)
        recent = removed_blocks.c.until_s >= since_s
        chosen = select(removed_blocks).where(recent).order_by(*order).limit(limit)
        rows = await self._rows(chosen)
        return tuple(
            RemovedBlockRow(BlockKey(row["key"]), row["until_s"])
            for row in reversed(rows)
        )

    async def tenant_keys(self) -> tuple[TenantKeyRow, ...]:
        """What tenants' blocks are encrypted with on SSDs, wrapped; destroyed ones too."""
        order = (tenant_keys.c.made_at_s, tenant_keys.c.tenant_tag)
        rows = await self._rows(select(tenant_keys).order_by(*order))
        return tuple(TenantKeyRow(**row) for row in rows)

    async def add_tenant_key(self, row: TenantKeyRow) -> TenantKeyRow:
        """Add it unless the tenant has one, or had: the one that is there now."""
        async with transaction(self._engine, writes=True) as connection:
            return await add_tenant_key(connection, row)

    async def _rows(self, statement: Executable) -> list[Values]:
        async with transaction(self._engine, writes=False) as connection:
            result = await connection.execute(statement)
            return [dict(row) for row in result.mappings()]
