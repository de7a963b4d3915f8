"""The one secret of a simulated cluster, and the key spaces made with it."""

from functools import lru_cache

from kvtide.kv import KeySpace, SpaceId, TenantId
from kvtide.sim.engine import FACTS

SECRET = b"the secret of a simulated cluster"


@lru_cache(maxsize=64)
def space_of(tenant: TenantId, salt: str) -> KeySpace:
    """The key space of a tenant on the simulated model."""
    return KeySpace(SECRET, SpaceId(tenant, FACTS, salt))
