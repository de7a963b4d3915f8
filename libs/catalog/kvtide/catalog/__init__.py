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
from kvtide.catalog.records import (
    ApiKeyRow,
    BlockDropped,
    BlockRow,
    BlocksForgotten,
    CandidateRow,
    Change,
    DecisionOutcome,
    DecisionRow,
    NodeRow,
    QuotaRow,
    RequestRow,
    TenantRow,
    Verdict,
)
from kvtide.catalog.repository import BlockCount, BlockQuery, Catalog
from kvtide.catalog.writer import ChangeSink, Writer, WriterLimits

__all__ = [
    "HEAD",
    "ApiKeyRow",
    "BlockCount",
    "BlockDropped",
    "BlockQuery",
    "BlockRow",
    "BlocksForgotten",
    "CandidateRow",
    "Catalog",
    "CatalogError",
    "CatalogRejectedError",
    "CatalogRevisionError",
    "CatalogUnavailableError",
    "Change",
    "ChangeSink",
    "DecisionOutcome",
    "DecisionRow",
    "NodeRow",
    "QuotaRow",
    "RequestRow",
    "TenantRow",
    "Verdict",
    "Writer",
    "WriterLimits",
    "catalog_url",
    "migrate",
]
