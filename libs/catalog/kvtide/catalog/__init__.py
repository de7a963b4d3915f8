"""The catalog: nodes, blocks, requests, decisions, tenants, keys and quotas in SQL.

``Catalog`` reads and writes, ``Writer`` writes behind a serving role, ``migrate`` makes
the schema. No serving step waits for any of them.
"""

from kvtide.catalog.access_queries import AuditQuery
from kvtide.catalog.database import catalog_url, is_missing
from kvtide.catalog.errors import (
    CatalogError,
    CatalogLostError,
    CatalogRejectedError,
    CatalogRevisionError,
    CatalogUnavailableError,
    TenancyError,
)
from kvtide.catalog.key_text import (
    KEY_BEGINS,
    TENANT_NAME,
    NewKey,
    check_tenant_name,
    key_hash,
    key_prefix,
    make_key,
)
from kvtide.catalog.migrate import HEAD, migrate
from kvtide.catalog.pruning import Cutoffs
from kvtide.catalog.queries import (
    BlockCount,
    BlockOrder,
    BlockQuery,
    HitQuery,
    HitRate,
    RemovalCount,
    RemovalQuery,
    TenantHits,
)
from kvtide.catalog.records import (
    Access,
    ApiKeyRow,
    AuditRow,
    BlockDropped,
    BlockRow,
    BlocksForgotten,
    BlockUsed,
    CandidateRow,
    Change,
    DecisionOutcome,
    DecisionRow,
    DeletionRow,
    KeyScope,
    NodeRow,
    OthersRow,
    QuotaRow,
    RemovalRow,
    RemovedBlockRow,
    RequestRow,
    TenantKeyRow,
    TenantRow,
    Verdict,
)
from kvtide.catalog.repository import Catalog
from kvtide.catalog.tenancy import (
    OPERATORS,
    Limits,
    Tenancy,
    live_tenant,
)
from kvtide.catalog.writer import ChangeSink, Writer, WriterLimits

__all__ = [
    "HEAD",
    "KEY_BEGINS",
    "OPERATORS",
    "TENANT_NAME",
    "Access",
    "ApiKeyRow",
    "AuditQuery",
    "AuditRow",
    "BlockCount",
    "BlockDropped",
    "BlockOrder",
    "BlockQuery",
    "BlockRow",
    "BlockUsed",
    "BlocksForgotten",
    "CandidateRow",
    "Catalog",
    "CatalogError",
    "CatalogLostError",
    "CatalogRejectedError",
    "CatalogRevisionError",
    "CatalogUnavailableError",
    "Change",
    "ChangeSink",
    "Cutoffs",
    "DecisionOutcome",
    "DecisionRow",
    "DeletionRow",
    "HitQuery",
    "HitRate",
    "KeyScope",
    "Limits",
    "NewKey",
    "NodeRow",
    "OthersRow",
    "QuotaRow",
    "RemovalCount",
    "RemovalQuery",
    "RemovalRow",
    "RemovedBlockRow",
    "RequestRow",
    "Tenancy",
    "TenancyError",
    "TenantHits",
    "TenantKeyRow",
    "TenantRow",
    "Verdict",
    "Writer",
    "WriterLimits",
    "catalog_url",
    "check_tenant_name",
    "is_missing",
    "key_hash",
    "key_prefix",
    "live_tenant",
    "make_key",
    "migrate",
]
