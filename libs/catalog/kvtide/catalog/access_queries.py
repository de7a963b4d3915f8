"""Questions about tenants, keys and what was done."""

from dataclasses import dataclass

from sqlalchemy import Select, Table, select
from sqlalchemy.ext.asyncio import AsyncConnection

from kvtide.catalog.queries import MAX_PAGE
from kvtide.catalog.records import Access, QuotaRow, TenantRow
from kvtide.catalog.rows import Values, api_key_row
from kvtide.catalog.tables import access, api_keys, audit, quotas, tenants


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """One page of the audit log; None is any."""

    limit: int = 100
    since_s: float | None = None
    actor: str | None = None
    action: str | None = None
    target: str | None = None


def select_audit(query: AuditQuery) -> Select[tuple[object, ...]]:
    """The newest entries first."""
    statement = select(audit)
    if query.since_s is not None:
        statement = statement.where(audit.c.at_s >= query.since_s)
    for column, wanted in (
        (audit.c.actor, query.actor),
        (audit.c.action, query.action),
        (audit.c.target, query.target),
    ):
        if wanted is not None:
            statement = statement.where(column == wanted)
    order = (audit.c.at_s.desc(), audit.c.entry)
    return statement.order_by(*order).limit(min(query.limit, MAX_PAGE))


async def read_access(connection: AsyncConnection) -> Access:
    """Who may ask; the revision is read first, so it is never too new."""

    async def rows(table: Table) -> list[Values]:
        order = tuple(table.primary_key)
        result = await connection.execute(select(table).order_by(*order))
        return [dict(row) for row in result.mappings()]

    found = await rows(access)
    return Access(
        revision=found[0]["revision"] if found else 0,
        keys_made=found[0]["keys_made"] if found else 0,
        tenants=tuple(TenantRow(**row) for row in await rows(tenants)),
        keys=tuple(api_key_row(row) for row in await rows(api_keys)),
        quotas=tuple(QuotaRow(**row) for row in await rows(quotas)),
    )
