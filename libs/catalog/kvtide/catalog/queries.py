"""What the catalog is asked, and the statements that answer it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Executable, Select, Table, UnaryExpression, and_, func, select
from sqlalchemy.sql.elements import ColumnElement

from kvtide.catalog.records import BlockRow, RemovalRow
from kvtide.catalog.rows import Values
from kvtide.catalog.tables import blocks, decisions, removals, requests
from kvtide.kv import BlockKey, NodeId, TenantId, Tier

MAX_PAGE = 10_000


class BlockOrder(StrEnum):
    """Which block rows come first."""

    KEY = "key"
    HOTTEST = "hottest"
    OLDEST = "oldest"
    NEWEST = "newest"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """Which block rows: every field that is not None must match.

    ``key_range`` is the first and the last key; ``stored_before_s`` and ``used_before_s`` are for age, ``least_hits`` for heat.
    Pages go by (node, key, tier), in the order ``KEY`` only; ``after`` is the last row of
    the page before.
    """

    node: NodeId | None = None
    tier: Tier | None = None
    model_tag: bytes | None = None
    tenant_tag: bytes | None = None
    key: BlockKey | None = None
    key_range: tuple[BlockKey, BlockKey] | None = None
    stored_before_s: float | None = None
    used_before_s: float | None = None
    least_hits: int | None = None
    order: BlockOrder = BlockOrder.KEY
    after: BlockRow | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class BlockCount:
    """How many copies a store holds in a tier, and their bytes."""

    node: NodeId
    tier: Tier
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HitQuery:
    """Requests that ended in [since, until), in steps of ``step_s`` seconds."""

    since_s: float
    until_s: float
    step_s: float = 60.0
    tenant: TenantId | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class HitRate:
    """What the requests that ended in one step found cached.

    ``hit_requests`` found anything at all. ``dram_tokens`` and ``ssd_tokens`` are where
    their last placement had their prefix read from; ``cached_tokens`` what they really
    did not have to compute.
    """

    start_s: float
    requests: int
    hit_requests: int
    prompt_tokens: int
    cached_tokens: int
    dram_tokens: int
    ssd_tokens: int


@dataclass(frozen=True, slots=True)
class TenantHits:
    """What one tenant's requests that ended in one step found cached."""

    start_s: float
    tenant: TenantId
    requests: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RemovalQuery:
    """Which removals: every field that is not None must match."""

    node: NodeId | None = None
    tier: Tier | None = None
    reason: str | None = None
    tenant_tag: bytes | None = None
    model_tag: bytes | None = None
    key: BlockKey | None = None
    since_s: float | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class RemovalCount:
    """How many copies went from a tier of a store for one reason, and their bytes."""

    node: NodeId
    tier: Tier
    reason: str
    blocks: int
    bytes: int


def _where_equal(
    statement: Select[Any], table: Table, wanted: Mapping[str, object]
) -> Select[Any]:
    """Only rows whose columns are as wanted; None: any."""
    for name, value in wanted.items():
        if value is not None:
            statement = statement.where(table.c[name] == value)
    return statement


def select_blocks(query: BlockQuery) -> Select[Any]:
    """One page of block rows."""
    wanted = {
        "node": query.node,
        "tier": query.tier and query.tier.value,
        "model_tag": query.model_tag,
        "tenant_tag": query.tenant_tag,
        "key": query.key,
    }
    statement = _where_equal(select(blocks), blocks, wanted).limit(
        min(query.limit, MAX_PAGE)
    )
    if query.key_range is not None:
        statement = statement.where(blocks.c.key.between(*query.key_range))
    if query.stored_before_s is not None:
        statement = statement.where(blocks.c.stored_at_s < query.stored_before_s)
    if query.used_before_s is not None:
        statement = statement.where(blocks.c.used_at_s < query.used_before_s)
    if query.least_hits is not None:
        statement = statement.where(blocks.c.hits >= query.least_hits)
    node, key, tier = blocks.c.node, blocks.c.key, blocks.c.tier
    if (last := query.after) is not None:
        later_key = (key > last.key) | ((key == last.key) & (tier > last.tier))
        statement = statement.where(
            (node > last.node) | ((node == last.node) & later_key)
        )
    return statement.order_by(*_block_order(query.order), node, key, tier)


def _block_order(order: BlockOrder) -> tuple[UnaryExpression[Any], ...]:
    match order:
        case BlockOrder.KEY:
            return ()
        case BlockOrder.HOTTEST:
            return (blocks.c.hits.desc(), blocks.c.used_at_s.desc())
        case BlockOrder.OLDEST:
            return (blocks.c.stored_at_s.asc(),)
        case BlockOrder.NEWEST:
            return (blocks.c.stored_at_s.desc(),)
        case BlockOrder.IDLE:
            return (blocks.c.used_at_s.asc(),)


def select_hit_rates(query: HitQuery) -> Executable:
    """One row for each step in which a request ended."""
    step: ColumnElement[float] = func.floor(requests.c.ended_at_s / query.step_s)
    matching = and_(
        decisions.c.request == requests.c.request,
        decisions.c.attempt == requests.c.attempt,
    )
    statement = (
        select(
            step.label("step"),
            func.count().label("requests"),
            func.count().filter(requests.c.cached_tokens > 0).label("hit_requests"),
            func.sum(requests.c.prompt_tokens).label("prompt_tokens"),
            func.sum(requests.c.cached_tokens).label("cached_tokens"),
            func.coalesce(func.sum(decisions.c.dram_tokens), 0).label("dram_tokens"),
            func.coalesce(func.sum(decisions.c.ssd_tokens), 0).label("ssd_tokens"),
        )
        .select_from(requests.outerjoin(decisions, matching))
        .where(requests.c.ended_at_s >= query.since_s)
        .where(requests.c.ended_at_s < query.until_s)
        .group_by(step)
        .order_by(step)
    )
    if query.tenant is not None:
        statement = statement.where(requests.c.tenant == query.tenant)
    if query.model is not None:
        statement = statement.where(requests.c.model == query.model)
    return statement.limit(MAX_PAGE)


def hit_rate(row: Values, step_s: float) -> HitRate:
    """A row of ``select_hit_rates``."""
    counts = {name: int(value) for name, value in row.items() if name != "step"}
    return HitRate(start_s=float(row["step"]) * step_s, **counts)


def select_tenant_hits(query: HitQuery, most: int) -> Executable:
    """Rows by step, of the ``most`` tenants with the longest prompts in all."""
    tenant, prompt_tokens = requests.c.tenant, func.sum(requests.c.prompt_tokens)
    wanted = [
        requests.c.ended_at_s >= query.since_s,
        requests.c.ended_at_s < query.until_s,
    ]
    if query.tenant is not None:
        wanted.append(tenant == query.tenant)
    if query.model is not None:
        wanted.append(requests.c.model == query.model)
    largest = (
        select(tenant)
        .where(*wanted)
        .group_by(tenant)
        .order_by(prompt_tokens.desc(), tenant)
        .limit(most)
    )
    step: ColumnElement[float] = func.floor(requests.c.ended_at_s / query.step_s)
    return (
        select(
            step.label("step"),
            tenant,
            func.count().label("requests"),
            prompt_tokens.label("prompt_tokens"),
            func.sum(requests.c.cached_tokens).label("cached_tokens"),
        )
        .where(*wanted, tenant.in_(largest))
        .group_by(step, tenant)
        .order_by(step, tenant)
        .limit(MAX_PAGE)
    )


def tenant_hits(row: Values, step_s: float) -> TenantHits:
    """A row of ``select_tenant_hits``."""
    return TenantHits(
        start_s=float(row["step"]) * step_s,
        tenant=TenantId(row["tenant"]),
        requests=int(row["requests"]),
        prompt_tokens=int(row["prompt_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
    )


def select_removals(query: RemovalQuery) -> Select[Any]:
    """Removals, the newest first."""
    wanted = {
        "node": query.node,
        "tier": query.tier and query.tier.value,
        "reason": query.reason,
        "tenant_tag": query.tenant_tag,
        "model_tag": query.model_tag,
        "key": query.key,
    }
    statement = _where_equal(select(removals), removals, wanted).limit(
        min(query.limit, MAX_PAGE)
    )
    if query.since_s is not None:
        statement = statement.where(removals.c.gone_at_s >= query.since_s)
    return statement.order_by(removals.c.gone_at_s.desc(), removals.c.key)


def removal_row(row: Values) -> RemovalRow:
    """A row of ``removals``."""
    changed: Values = {"tier": Tier(row["tier"])}
    return RemovalRow(**(row | changed))


def count_removals(since_s: float) -> Executable:
    """Removals by store, tier and reason."""
    by = (removals.c.node, removals.c.tier, removals.c.reason)
    return (
        select(
            *by,
            func.count().label("blocks"),
            func.sum(removals.c.length).label("bytes"),
        )
        .where(removals.c.gone_at_s >= since_s)
        .group_by(*by)
        .order_by(*by)
    )


def removal_count(row: Values) -> RemovalCount:
    """A row of ``count_removals``."""
    return RemovalCount(
        node=row["node"],
        tier=Tier(row["tier"]),
        reason=row["reason"],
        blocks=row["blocks"],
        bytes=int(row["bytes"]),
    )
