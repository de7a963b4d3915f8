"""Whether a key opens the door, by what was last read of the catalog. Pure."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtide.catalog import (
    Access,
    ApiKeyRow,
    KeyScope,
    TenantRow,
    key_hash,
    key_prefix,
)
from kvtide.gateway.access.auth_mode import AuthMode
from kvtide.gateway.access.caller import Caller
from kvtide.kv import TenantId


class Refused(StrEnum):
    """Why a key does not open the door."""

    MISSING = "missing"
    UNKNOWN = "unknown"
    REVOKED = "revoked"
    EXPIRED = "expired"
    TENANT_GONE = "tenant_gone"
    UNCHECKED = "unchecked"
    """It can't be told now: the catalog is away."""


@dataclass(frozen=True, slots=True)
class KeyRules:
    """``max_age_s``: for so long known keys go on without the catalog.

    What was read up to ``fresh_s`` ago is taken for the whole truth: a key that is not
    in it is unknown, not unchecked.
    """

    mode: AuthMode = AuthMode.AUTO
    default: Caller = Caller(TenantId("default"))  # noqa: RUF009 - frozen
    max_age_s: float = 900.0
    fresh_s: float = 10.0


class Keyring:
    """What one reading of the catalog says. Immutable; made anew at each change."""

    def __init__(self, access: Access) -> None:
        """Index it; keys without a prefix (of the first schema) open nothing."""
        self.revision = access.revision
        self.keys_made = access.keys_made
        self._keys: Mapping[str, ApiKeyRow] = {
            row.prefix: row for row in access.keys if row.prefix
        }
        self._tenants: Mapping[TenantId, TenantRow] = {
            row.tenant: row for row in access.tenants
        }

    def __len__(self) -> int:
        """Keys that are kept, revoked ones too."""
        return len(self._keys)

    def find(self, presented: str, wall_s: float) -> Caller | Refused:
        """Whose key it is. The comparison takes the same time wherever they differ."""
        prefix = key_prefix(presented)
        row = self._keys.get(prefix) if prefix is not None else None
        if row is None or not hmac.compare_digest(row.key_hash, key_hash(presented)):
            return Refused.UNKNOWN
        if row.revoked_at_s is not None:
            return Refused.REVOKED
        if row.expires_at_s is not None and wall_s >= row.expires_at_s:
            return Refused.EXPIRED
        if row.scope is KeyScope.ADMIN:
            return Caller(row.tenant, key=row.prefix, admin=True)
        tenant = self._tenants.get(row.tenant)
        if tenant is None or tenant.deleted_at_s is not None:
            return Refused.TENANT_GONE
        return Caller(row.tenant, share=tenant.share, key=row.prefix)


def judge(
    rules: KeyRules,
    ring: Keyring | None,
    age_s: float,
    presented: str | None,
    wall_s: float,
) -> Caller | Refused:
    """Who asks, or why not. ``ring`` was true ``age_s`` ago; None: never read."""
    unkeyed = ring is not None and not ring.keys_made
    if rules.mode is AuthMode.AUTO and unkeyed:
        return rules.default
    found = _look_up(rules, ring, age_s, presented, wall_s)
    if rules.mode is AuthMode.OPEN and isinstance(found, Refused):
        return rules.default
    return found


def _look_up(
    rules: KeyRules,
    ring: Keyring | None,
    age_s: float,
    presented: str | None,
    wall_s: float,
) -> Caller | Refused:
    if ring is None or age_s > rules.max_age_s:
        return Refused.UNCHECKED
    if presented is None:
        return Refused.MISSING
    found = ring.find(presented, wall_s)
    if found is Refused.UNKNOWN and age_s > rules.fresh_s:
        return Refused.UNCHECKED
    return found
