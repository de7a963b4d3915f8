"""The one client of the pool: puts into the store on this host, reads from any store.

Readers verify what they copied, so a wrong byte is a miss and never an error.
"""

from kvtide.pool.client import PoolClient
from kvtide.pool.errors import PoolError, PoolUnavailable, PutClosed
from kvtide.pool.ledger import Ledger
from kvtide.pool.limits import PoolLimits
from kvtide.pool.outcomes import MissReason, PartRead, PartSink, ReadOutcome
from kvtide.pool.put import Put
from kvtide.pool.staging import Stager

__all__ = [
    "Ledger",
    "MissReason",
    "PartRead",
    "PartSink",
    "PoolClient",
    "PoolError",
    "PoolLimits",
    "PoolUnavailable",
    "Put",
    "PutClosed",
    "ReadOutcome",
    "Stager",
]
