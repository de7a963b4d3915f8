"""The catalog: typed records in and out of SQLite or PostgreSQL.

Nothing here is for a serving step to wait on: roles write through ``Writer``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, Self, assert_never

from sqlalchemy import Executable, Table, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from kvtide.catalog.database import open_engine, transaction
from kvtide.catalog.migrate import migrate_engine, revision
from kvtide.catalog.records import (
    ApiKeyRow,
    BlockDropped,
    BlockRow,
    BlocksForgotten,
    Change,
    DecisionOutcome,
    DecisionRow,
    NodeRow,
    QuotaRow,
    RequestRow,
    TenantRow,
)
from kvtide.catalog.rows import (
    TARGETS,
    Row,
    Values,
    block_row,
    decision_row,
    node_row,
    request_row,
    values,
)
from kvtide.catalog.tables import (
    api_keys,
    blocks,
    decisions,
    nodes,
    quotas,
    requests,
    tenants,
)
from kvtide.kv import (
    BlockKey,
    NodeId,
    RequestId,
    TenantId,
    Tier,
    name_prefix,
)

MAX_PAGE = 10_000


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """Which block rows: every field that is not None must match.

    Pages go by (node, key, tier); ``after`` is the last row of the page before.
    """

    node: NodeId | None = None
    tier: Tier | None = None
    model_tag: bytes | None = None
    tenant_tag: bytes | None = None
    key: BlockKey | None = None
    after: BlockRow | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class BlockCount:
    """How many copies a store holds in a tier, and their bytes."""

    node: NodeId
    tier: Tier
    blocks: int
    bytes: int


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
        async with transaction(self._engine, writes=True) as connection:
            for kind, group in groupby(changes, key=type):
                await _write_group(connection, kind, tuple(group))

    async def nodes(self) -> tuple[NodeRow, ...]:
        """All nodes that were ever seen, by name."""
        rows = await self._rows(select(nodes).order_by(nodes.c.node))
        return tuple(node_row(row) for row in rows)

    async def blocks(self, query: BlockQuery) -> tuple[BlockRow, ...]:
        """One page of block rows, by (node, key, tier)."""
        order = (blocks.c.node, blocks.c.key, blocks.c.tier)
        statement = select(blocks).order_by(*order).limit(min(query.limit, MAX_PAGE))
        wanted = {
            "node": query.node,
            "tier": query.tier and query.tier.value,
            "model_tag": query.model_tag,
            "tenant_tag": query.tenant_tag,
            "key": query.key,
        }
        for name, value in wanted.items():
            if value is not None:
                statement = statement.where(blocks.c[name] == value)
        if (last := query.after) is not None:
            node, key, tier = order
            later_key = (key > last.key) | ((key == last.key) & (tier > last.tier))
            statement = statement.where(
                (node > last.node) | ((node == last.node) & later_key)
            )
        return tuple(block_row(row) for row in await self._rows(statement))

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
        return tuple(ApiKeyRow(**row) for row in rows)

    async def quotas(self) -> tuple[QuotaRow, ...]:
        """All tenants' limits."""
        rows = await self._rows(select(quotas).order_by(quotas.c.tenant))
        return tuple(QuotaRow(**row) for row in rows)

    async def prune(self, *, before_s: float) -> int:
        """Delete decisions and requests older than ``before_s``; returns how many."""
        async with transaction(self._engine, writes=True) as connection:
            old = (
                delete(decisions).where(decisions.c.decided_at_s < before_s),
                delete(requests).where(requests.c.ended_at_s < before_s),
            )
            done = [await connection.execute(statement) for statement in old]
        return sum(result.rowcount for result in done)

    async def _rows(self, statement: Executable) -> list[Values]:
        async with transaction(self._engine, writes=False) as connection:
            result = await connection.execute(statement)
            return [dict(row) for row in result.mappings()]


async def _write_group(
    connection: AsyncConnection, kind: type, group: tuple[Change, ...]
) -> None:
    if kind in TARGETS:
        rows = [change for change in group if isinstance(change, Row)]
        await _upsert(connection, TARGETS[kind].table, rows)
        return
    for change in group:
        await _change(connection, change)


async def _upsert(
    connection: AsyncConnection, table: Table, records: Iterable[Row]
) -> None:
    """Insert or replace; of records with one primary key the last one counts."""
    keys = [column.name for column in table.primary_key]
    newest: dict[tuple[Any, ...], Values] = {}
    kept: tuple[str, ...] = ()
    for record in records:
        row = values(record)
        newest[tuple(row[key] for key in keys)] = row
        kept = TARGETS[type(record)].kept
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(table)
    names = next(iter(newest.values())).keys()
    changed = {
        name: insert.excluded[name]
        for name in names
        if name not in keys and name not in kept
    }
    statement = insert.on_conflict_do_update(index_elements=keys, set_=changed)
    await connection.execute(statement, list(newest.values()))


async def _change(connection: AsyncConnection, change: Change) -> None:
    match change:
        case BlockDropped():
            statement = delete(blocks).where(
                blocks.c.node == change.node,
                blocks.c.key == change.key,
                blocks.c.tier == change.tier.value,
                blocks.c.generation == change.generation,
            )
        case BlocksForgotten():
            statement = delete(blocks).where(
                blocks.c.node == change.node,
                blocks.c.tier == change.tier.value,
                blocks.c.epoch < change.epoch,
            )
        case DecisionOutcome():
            statement = (
                update(decisions)
                .where(
                    decisions.c.request == change.request,
                    decisions.c.attempt == change.attempt,
                )
                .values(
                    outcome=change.outcome,
                    outcome_cached_tokens=change.cached_tokens,
                    outcome_ttft_ms=change.ttft_ms,
                    outcome_tbt_ms=change.tbt_ms,
                )
            )
        case (
            NodeRow()
            | BlockRow()
            | DecisionRow()
            | RequestRow()
            | TenantRow()
            | ApiKeyRow()
            | QuotaRow()
        ):
            raise TypeError("upserted, not changed")
        case _:
            assert_never(change)
    await connection.execute(statement)
