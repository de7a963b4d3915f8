"""Who a request comes from, as its key says."""

from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from kvtide.kv import TenantId

_STATE = "kvtide_caller"
_SHARED = "shared:"
"""No tenant can be named so: see ``TENANT_NAME`` in the catalog."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, by the key with this public prefix; without keys, the default one.

    ``share`` is the operator's name of a cache that tenants use together on purpose.
    """

    tenant: TenantId
    share: str = ""
    key: str = ""
    admin: bool = False

    @property
    def cache_owner(self) -> TenantId:
        """In whose name blocks are kept and found: the tenant's own, or the share's."""
        return TenantId(_SHARED + self.share) if self.share else self.tenant


def set_caller(scope: Scope, caller: Caller) -> None:
    """Note who asks; once for each request, before any route sees it."""
    scope.setdefault("state", {})[_STATE] = caller


def caller_of(scope: Scope) -> Caller:
    """Who asks. Every request that reaches a route has one."""
    return cast("Caller", scope["state"][_STATE])
