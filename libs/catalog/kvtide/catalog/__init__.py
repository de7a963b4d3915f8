"""The catalog: nodes, blocks, requests, decisions, tenants, keys and quotas in SQL.

``Catalog`` reads and writes, ``Writer`` writes behind a serving role, ``migrate`` makes
the schema. No serving step waits for any of them.
"""

from kvtide.catalog.database import catalog_url
from kvtide.catalog.errors import (
    CatalogError,
    CatalogRejectedError,
    CatalogRevisionError,
    CatalogUnavailableError,
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
)
from kvtide.catalog.records import (
    ApiKeyRow,
    BlockDropped,
    BlockRow,
    BlocksForgotten,
    BlockUsed,
    CandidateRow,
    Change,
    DecisionOutcome,
    DecisionRow,
    DeletionRow,
    NodeRow,
    QuotaRow,
    RemovalRow,
    RequestRow,
    TenantRow,
    Verdict,
)
from kvtide.catalog.repository import Catalog
from kvtide.catalog.writer import ChangeSink, Writer, WriterLimits

__all__ = [
    "HEAD",
    "ApiKeyRow",
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
    "NodeRow",
    "QuotaRow",
    "RemovalCount",
    "RemovalQuery",
    "RemovalRow",
    "RequestRow",
    "TenantRow",
    "Verdict",
    "Writer",
    "WriterLimits",
    "catalog_url",
    "migrate",
]
