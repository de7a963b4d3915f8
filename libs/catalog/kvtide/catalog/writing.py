"""Writes changes: what each kind of them does to the tables, many at a time."""

from collections.abc import Iterable, Sequence
from typing import Any, assert_never

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    LargeBinary,
    String,
    Table,
    and_,
    bindparam,
    delete,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from kvtide.catalog.records import (
    ApiKeyRow,
    AuditRow,
    BlockDropped,
    BlockRow,
    BlocksForgotten,
    BlockUsed,
    Change,
    DecisionOutcome,
    DecisionRow,
    DeletionRow,
    NodeRow,
    QuotaRow,
    RemovedBlockRow,
    RequestRow,
    TenantKeyRow,
    TenantRow,
)
from kvtide.catalog.rows import TARGETS, Row, Values, values
from kvtide.catalog.tables import access, blocks, decisions, removals

REASON_CHARS = 128


_OF_REQUESTS = (DecisionRow, RequestRow, DecisionOutcome)


def in_groups(changes: Sequence[Change]) -> list[Change]:
    """The same changes, those of requests behind all others and by kind.

    They come in turns, and a group of one costs as much as one of hundreds. No other
    rows depend on theirs; an outcome goes into its decision's row, so it comes last.
    """
    last = sorted(
        (change for change in changes if isinstance(change, _OF_REQUESTS)),
        key=lambda change: _OF_REQUESTS.index(type(change)),
    )
    return [each for each in changes if not isinstance(each, _OF_REQUESTS)] + last


async def write_group(
    connection: AsyncConnection, kind: type, group: tuple[Change, ...]
) -> None:
    """Write changes of one kind, in order."""
    if kind in TARGETS:
        rows = [change for change in group if isinstance(change, Row)]
        await _upsert(connection, TARGETS[kind].table, rows)
        if kind in (TenantRow, ApiKeyRow, QuotaRow):
            made = len(rows) if kind is ApiKeyRow else 0
            await _count_access(connection, made)
        return
    ended = [change for change in group if isinstance(change, DecisionOutcome)]
    dropped = [change for change in group if isinstance(change, BlockDropped)]
    used = [change for change in group if isinstance(change, BlockUsed)]
    if dropped:
        await _drop(connection, dropped)
    elif used:
        await _use(connection, used)
    elif ended:
        await _end(connection, ended)
    else:
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


async def _count_access(connection: AsyncConnection, keys_made: int) -> None:
    """Who may ask has changed: those who look for that see the revision grow."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(access).values(id=1, revision=1, keys_made=keys_made)
    statement = insert.on_conflict_do_update(
        index_elements=["id"],
        set_={
            "revision": access.c.revision + 1,
            "keys_made": access.c.keys_made + keys_made,
        },
    )
    await connection.execute(statement)


async def _change(connection: AsyncConnection, change: Change) -> None:
    match change:
        case BlocksForgotten():
            statement = delete(blocks).where(
                blocks.c.node == change.node,
                blocks.c.tier == change.tier.value,
                blocks.c.epoch < change.epoch,
            )
        case (
            NodeRow()
            | BlockDropped()
            | BlockUsed()
            | BlockRow()
            | DecisionRow()
            | DecisionOutcome()
            | RequestRow()
            | TenantRow()
            | DeletionRow()
            | RemovedBlockRow()
            | TenantKeyRow()
            | ApiKeyRow()
            | QuotaRow()
            | AuditRow()
        ):
            raise TypeError("written in groups")
        case _:
            assert_never(change)
    await connection.execute(statement)


def _this_copy() -> ColumnElement[bool]:
    """The row of one use of one slot, by parameters (see ``_copy_values``)."""
    return and_(
        blocks.c.node == bindparam("at_node", type_=String),
        blocks.c.key == bindparam("at_key", type_=LargeBinary),
        blocks.c.tier == bindparam("at_tier", type_=String),
        blocks.c.generation == bindparam("at_generation", type_=BigInteger),
    )


def _copy_values(change: BlockDropped | BlockUsed) -> Values:
    return {
        "at_node": change.node,
        "at_key": change.key,
        "at_tier": change.tier.value,
        "at_generation": change.generation,
    }


async def _drop(connection: AsyncConnection, dropped: Sequence[BlockDropped]) -> None:
    """Delete the rows of these copies; of those with a reason, keep why they went."""
    told = [
        {
            **_copy_values(change),
            "why": change.reason[:REASON_CHARS],
            "at_s": change.gone_at_s,
        }
        for change in dropped
        if change.reason
    ]
    if told:
        kept = [
            column.name for column in removals.columns if column.name in blocks.columns
        ]
        names = [*kept, "reason", "gone_at_s"]
        row = select(
            *(blocks.c[name] for name in kept),
            bindparam("why", type_=String),
            bindparam("at_s", type_=Double),
        )
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        insert = dialect.insert(removals).from_select(names, row.where(_this_copy()))
        await connection.execute(insert.on_conflict_do_nothing(), told)
    gone = [_copy_values(change) for change in dropped]
    await connection.execute(delete(blocks).where(_this_copy()), gone)


async def _end(connection: AsyncConnection, ended: Sequence[DecisionOutcome]) -> None:
    """Put what came of decisions into their rows."""
    statement = (
        update(decisions)
        .where(
            decisions.c.request == bindparam("of_request", type_=String),
            decisions.c.attempt == bindparam("of_attempt", type_=BigInteger),
        )
        .values(
            outcome=bindparam("to_outcome", type_=String),
            outcome_cached_tokens=bindparam("to_cached_tokens", type_=BigInteger),
            outcome_ttft_ms=bindparam("to_ttft_ms", type_=Double),
            outcome_tbt_ms=bindparam("to_tbt_ms", type_=Double),
        )
    )
    values = [
        {
            "of_request": each.request,
            "of_attempt": each.attempt,
            "to_outcome": each.outcome,
            "to_cached_tokens": each.cached_tokens,
            "to_ttft_ms": each.ttft_ms,
            "to_tbt_ms": each.tbt_ms,
        }
        for each in ended
    ]
    await connection.execute(statement, values)


async def _use(connection: AsyncConnection, used: Sequence[BlockUsed]) -> None:
    statement = (
        update(blocks)
        .where(_this_copy())
        .values(
            used_at_s=bindparam("to_used_at_s", type_=Double),
            hits=bindparam("to_hits", type_=BigInteger),
        )
    )
    values = [
        {
            **_copy_values(change),
            "to_used_at_s": change.used_at_s,
            "to_hits": change.hits,
        }
        for change in used
    ]
    await connection.execute(statement, values)
