"""Deletes what is too old, in pieces that hold no lock for long."""

import asyncio
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, delete, literal_column, select
from sqlalchemy.ext.asyncio import AsyncEngine

from kvtide.catalog.database import transaction
from kvtide.catalog.tables import (
    api_keys,
    audit,
    blocks,
    decisions,
    deletions,
    nodes,
    quotas,
    removals,
    removed_blocks,
    requests,
    tenants,
)
from kvtide.kv import Tier

PIECE_ROWS = 2000
PAUSE_S = 0.01
"""Between two pieces others may write."""


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """Older rows go; wall-clock seconds, None keeps all of a kind.

    ``requests_s``: decisions and ended requests. ``removals_s``: why blocks went.
    ``lost_s``: DRAM rows of stores that are gone since before then, which nobody else
    can take back. ``nodes_s``: nodes gone since before then that have no blocks left.
    ``tenants_s``: deleted tenants, with their keys and quotas, and what people
    removed; a store that was down for longer may bring those blocks back.
    ``audit_s``: entries of the audit log.
    """

    requests_s: float | None = None
    removals_s: float | None = None
    lost_s: float | None = None
    nodes_s: float | None = None
    tenants_s: float | None = None
    audit_s: float | None = None


async def prune(engine: AsyncEngine, before: Cutoffs) -> int:
    """Delete them; returns how many rows went."""
    gone = 0
    for table, condition in _conditions(before):
        while True:
            rows = await _delete_some(engine, table, condition)
            gone += rows
            if rows < PIECE_ROWS:
                break
            await asyncio.sleep(PAUSE_S)
    return gone


def _conditions(before: Cutoffs) -> list[tuple[Table, ColumnElement[bool]]]:
    found: list[tuple[Table, ColumnElement[bool]]] = []
    if before.requests_s is not None:
        found += [
            (decisions, decisions.c.decided_at_s < before.requests_s),
            (requests, requests.c.ended_at_s < before.requests_s),
        ]
    if before.removals_s is not None:
        found.append((removals, removals.c.gone_at_s < before.removals_s))
    if before.lost_s is not None:
        lost = select(nodes.c.node).where(nodes.c.gone_at_s < before.lost_s)
        in_dram = blocks.c.tier == Tier.DRAM.value
        found.append((blocks, in_dram & blocks.c.node.in_(lost)))
    if before.nodes_s is not None:
        empty = nodes.c.node.not_in(select(blocks.c.node).distinct())
        found.append((nodes, (nodes.c.gone_at_s < before.nodes_s) & empty))
    if before.tenants_s is not None:
        old = tenants.c.deleted_at_s < before.tenants_s
        names = select(tenants.c.tenant).where(old)
        found += [
            (api_keys, api_keys.c.tenant.in_(names)),
            (quotas, quotas.c.tenant.in_(names)),
            (tenants, old),
            (deletions, deletions.c.until_s < before.tenants_s),
            (removed_blocks, removed_blocks.c.until_s < before.tenants_s),
        ]
    if before.audit_s is not None:
        found.append((audit, audit.c.at_s < before.audit_s))
    return found


async def _delete_some(
    engine: AsyncEngine, table: Table, condition: ColumnElement[bool]
) -> int:
    """At most ``PIECE_ROWS`` rows, by the database's own row number."""
    own = "ctid" if engine.dialect.name == "postgresql" else "rowid"
    row: ColumnElement[Any] = literal_column(f"{table.name}.{own}")
    some: Select[Any] = (
        select(row).select_from(table).where(condition).limit(PIECE_ROWS)
    )
    async with transaction(engine, writes=True) as connection:
        result = await connection.execute(delete(table).where(row.in_(some)))
        return result.rowcount
