"""Records to table rows and back: the only place that knows both.

Databases have signed 64-bit integers only, so ``header_xxh3`` is stored as the signed
number with the same bits. Rows are dicts for SQLAlchemy and never leave this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Table

from kvtide.catalog.records import (
    ApiKeyRow,
    AuditRow,
    BlockRow,
    CandidateRow,
    DecisionOutcome,
    DecisionRow,
    DeletionRow,
    KeyScope,
    NodeRow,
    OthersRow,
    QuotaRow,
    RemovedBlockRow,
    RequestRow,
    TenantKeyRow,
    TenantRow,
    Verdict,
)
from kvtide.catalog.tables import (
    api_keys,
    audit,
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
from kvtide.kv import Tier

Row = (
    NodeRow
    | BlockRow
    | DecisionRow
    | RequestRow
    | TenantRow
    | DeletionRow
    | RemovedBlockRow
    | TenantKeyRow
    | ApiKeyRow
    | QuotaRow
    | AuditRow
)
"""The records that are upserted; the other changes are updates and deletions."""

Values = dict[str, Any]

_SIGN_BIT = 1 << 63
_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Target:
    """Where a record goes: its table, and the columns that an upsert leaves alone."""

    table: Table
    kept: tuple[str, ...] = ()


TARGETS: Mapping[type, Target] = {
    NodeRow: Target(nodes),
    BlockRow: Target(blocks),
    DecisionRow: Target(decisions),
    RequestRow: Target(requests),
    TenantRow: Target(tenants, kept=("created_at_s",)),
    DeletionRow: Target(deletions),
    RemovedBlockRow: Target(removed_blocks),
    TenantKeyRow: Target(tenant_keys),
    ApiKeyRow: Target(api_keys, kept=("created_at_s",)),
    QuotaRow: Target(quotas),
    AuditRow: Target(audit),
}


def values(record: Row) -> Values:
    """The column values of a record."""
    row = {name: getattr(record, name) for name in record.__dataclass_fields__}
    match record:
        case NodeRow():
            row["roles"] = " ".join(record.roles)
        case BlockRow():
            row["tier"] = record.tier.value
            row["header_xxh3"] = signed(record.header_xxh3)
        case DecisionRow():
            row["verdict"] = record.verdict.value
            row["candidates"] = msgspec.json.encode(record.candidates).decode()
            others = record.others
            row["others"] = others and msgspec.json.encode(others).decode()
            del row["outcome"]
        case ApiKeyRow():
            row["scope"] = record.scope.value
        case _:
            pass
    return row


def signed(number: int) -> int:
    """Unsigned 64 bits as the signed number that databases store."""
    return number - _MODULUS if number >= _SIGN_BIT else number


def unsigned(number: int) -> int:
    """The reverse of ``signed``."""
    return number + _MODULUS if number < 0 else number


def node_row(row: Values) -> NodeRow:
    """A row of ``nodes``."""
    changed: Values = {"roles": tuple(row["roles"].split())}
    return NodeRow(**(row | changed))


def block_row(row: Values) -> BlockRow:
    """A row of ``blocks``."""
    xxh3 = unsigned(row["header_xxh3"])
    changed: Values = {"tier": Tier(row["tier"]), "header_xxh3": xxh3}
    return BlockRow(**(row | changed))


def decision_row(row: Values) -> DecisionRow:
    """A row of ``decisions``."""
    outcome, others = row.pop("outcome"), row["others"]
    cached_tokens = row.pop("outcome_cached_tokens")
    ttft_ms, tbt_ms = row.pop("outcome_ttft_ms"), row.pop("outcome_tbt_ms")
    candidates = msgspec.json.decode(row["candidates"], type=tuple[CandidateRow, ...])
    ended = outcome and DecisionOutcome(
        request=row["request"],
        attempt=row["attempt"],
        outcome=outcome,
        cached_tokens=cached_tokens,
        ttft_ms=ttft_ms,
        tbt_ms=tbt_ms,
    )
    changed: Values = {
        "verdict": Verdict(row["verdict"]),
        "candidates": candidates,
        "others": others and msgspec.json.decode(others, type=OthersRow),
        "outcome": ended,
    }
    return DecisionRow(**(row | changed))


def request_row(row: Values) -> RequestRow:
    """A row of ``requests``."""
    return RequestRow(**row)


def api_key_row(row: Values) -> ApiKeyRow:
    """A row of ``api_keys``."""
    changed: Values = {"scope": KeyScope(row["scope"])}
    return ApiKeyRow(**(row | changed))
