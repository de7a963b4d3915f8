"""Administration of tenants and keys: each change with its entry in the audit log.

Change and entry are written in one transaction: nothing is done without being noted.
Gateways and conductors hear of it when they next read (see ``Catalog.access``).
"""

import secrets
from dataclasses import dataclass, replace

from kvtide.catalog.errors import TenancyError
from kvtide.catalog.key_text import NewKey, check_tenant_name, make_key
from kvtide.catalog.records import (
    Access,
    ApiKeyRow,
    AuditRow,
    Change,
    KeyScope,
    QuotaRow,
    TenantKeyRow,
    TenantRow,
)
from kvtide.catalog.repository import Catalog
from kvtide.kv import TenantId
from kvtide.runtime import Clock

OPERATORS = TenantId("_operators")
"""Whose the admin keys are. No tenant can be named so."""

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use; None is no limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent_requests: int | None = None

    def __str__(self) -> str:
        """For people: those that are set."""
        named = (
            ("requests a minute", self.requests_per_min),
            ("tokens a minute", self.tokens_per_min),
            ("requests at once", self.concurrent_requests),
        )
        parts = [f"{value} {name}" for name, value in named if value is not None]
        return ", ".join(parts) or "no limits"

    def row(self, tenant: TenantId) -> QuotaRow:
        """As the catalog keeps them."""
        return QuotaRow(
            tenant,
            self.requests_per_min,
            self.tokens_per_min,
            self.concurrent_requests,
        )


@dataclass(frozen=True, slots=True)
class Tenancy:
    """``actor`` is who does it, as the audit log shall name them.

    Every method raises ``CatalogUnavailableError`` when the database is away, and
    ``TenancyError`` for what can't be done.
    """

    catalog: Catalog
    clock: Clock
    actor: str

    async def add_tenant(
        self, name: str, *, title: str, share: str, limits: Limits
    ) -> TenantRow:
        """A new tenant.

        Raises:
            ConfigError: it can't be named so.
        """
        tenant = check_tenant_name(name)
        if share:
            check_tenant_name(share, what="share")
        known = _find(await self.catalog.access(), tenant)
        if known is not None:
            said = "was deleted" if known.deleted_at_s is not None else "is there"
            raise TenancyError(
                f"tenant {tenant} {said} already", key="tenant", found=True
            )
        row = TenantRow(tenant, title or tenant, self.clock.wall(), share=share)
        detail = f"{limits}, shares {share}" if share else str(limits)
        await self._write(
            "tenant.add", tenant, (row, limits.row(tenant)), detail=detail
        )
        return row

    async def set_tenant(
        self, name: str, *, share: str | None, limits: Limits
    ) -> QuotaRow:
        """Replace a tenant's limits, and the cache that it shares; None: leave that."""
        row = live_tenant(await self.catalog.access(), name)
        changes: list[Change] = []
        if share is not None:
            if share:
                check_tenant_name(share, what="share")
            changes.append(replace(row, share=share))
        quota = limits.row(row.tenant)
        detail = (
            str(limits) if share is None else f"{limits}, shares {share or 'nothing'}"
        )
        await self._write("tenant.set", row.tenant, (*changes, quota), detail=detail)
        return quota

    async def delete_tenant(self, name: str, tag: bytes) -> int:
        """End a tenant: its keys open nothing, its blocks go; how many keys it had.

        Stores forget its blocks when they start; who calls tells those that run.
        What its blocks are encrypted with on SSDs, under its ``tag``, is destroyed.
        """
        access = await self.catalog.access()
        row = live_tenant(access, name)
        now_s = self.clock.wall()
        keys = [
            replace(key, revoked_at_s=now_s)
            for key in access.keys
            if key.tenant == row.tenant and key.revoked_at_s is None
        ]
        await self._write(
            "tenant.delete",
            row.tenant,
            (
                replace(row, deleted_at_s=now_s),
                TenantKeyRow(tag, b"", "", b"", now_s, destroyed_at_s=now_s),
                *keys,
            ),
            detail=f"{len(keys)} keys revoked",
        )
        return len(keys)

    async def make_key(
        self, name: str, *, label: str, days: float | None, scope: KeyScope
    ) -> tuple[NewKey, ApiKeyRow]:
        """A new key of a tenant, or of the operators. Its text can't be had again."""
        now_s = self.clock.wall()
        changes: list[Change] = []
        if scope is KeyScope.ADMIN:
            tenant = OPERATORS
            changes.append(TenantRow(OPERATORS, "operators", now_s))
        else:
            tenant = live_tenant(await self.catalog.access(), name).tenant
        made = make_key()
        row = ApiKeyRow(
            made.key_hash,
            tenant,
            label,
            now_s,
            expires_at_s=None if days is None else now_s + days * _DAY_S,
            prefix=made.prefix,
            scope=scope,
        )
        detail = f"of {tenant}, {scope.value}"
        await self._write("key.make", made.prefix, (*changes, row), detail=detail)
        return made, row

    async def revoke_key(self, prefix: str) -> ApiKeyRow:
        """End a key, by its prefix (with or without ``kvt_``)."""
        wanted = prefix.removeprefix("kvt_").partition("_")[0]
        access = await self.catalog.access()
        for row in access.keys:
            if wanted and row.prefix == wanted:
                if row.revoked_at_s is not None:
                    raise TenancyError(
                        f"key {wanted} is revoked already", key="prefix", found=True
                    )
                gone = replace(row, revoked_at_s=self.clock.wall())
                detail = f"of {row.tenant}, {row.scope.value}"
                await self._write("key.revoke", wanted, (gone,), detail=detail)
                return gone
        raise TenancyError(f"no key begins with {wanted[:40]!r}", key="prefix")

    async def _write(
        self, action: str, target: str, changes: tuple[Change, ...], *, detail: str
    ) -> None:
        entry = AuditRow(
            entry=secrets.token_hex(16),
            at_s=self.clock.wall(),
            actor=self.actor,
            action=action,
            target=target,
            outcome="done",
            detail=detail,
        )
        await self.catalog.write((*changes, entry))


def live_tenant(access: Access, name: str) -> TenantRow:
    """The tenant of that name.

    Raises:
        TenancyError: there is none, or it was deleted.
    """
    row = _find(access, TenantId(name))
    if row is None or row.deleted_at_s is not None or row.tenant == OPERATORS:
        raise TenancyError(
            f"there is no tenant {name[:80]!r}; add it with kvtide tenants add",
            key="tenant",
        )
    return row


def _find(access: Access, tenant: TenantId) -> TenantRow | None:
    return next((row for row in access.tenants if row.tenant == tenant), None)
