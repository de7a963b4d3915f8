"""``kvtide keys``: API keys, of which only a hash is kept."""

import asyncio
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.catalog import KEY_BEGINS, ApiKeyRow, KeyScope, NewKey
from kvtide.cli.tenancy_desk import open_tenancy
from kvtide.runtime import ConfigError, SystemClock
from kvtide.runtime.settings import RoleSettings

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class NewKeyWish:
    """What key is wanted; ``days`` None: it never expires."""

    tenant: str
    label: str
    days: float | None
    admin: bool


class MadeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was just made: the only time that ``key`` is seen."""

    key: str
    prefix: str
    tenant: str
    scope: str


class ShownKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as lists show it. Times are seconds since the Unix epoch."""

    prefix: str
    tenant: str
    scope: str
    label: str
    state: str
    created_at_s: float
    expires_at_s: float | None
    revoked_at_s: float | None


def make(
    settings: RoleSettings, wish: NewKeyWish, *, as_json: bool, console: Console
) -> None:
    """Make one and print it.

    Raises:
        ConfigError: neither a tenant nor --admin is named, or both are.
        TenancyError, NoCatalogError: it can't be done.
    """
    if bool(wish.tenant) == wish.admin:
        raise ConfigError("name either a tenant or --admin", key="tenant")
    scope = KeyScope.ADMIN if wish.admin else KeyScope.CLIENT

    async def work() -> tuple[NewKey, ApiKeyRow]:
        async with open_tenancy(settings) as tenancy:
            return await tenancy.make_key(
                wish.tenant, label=wish.label, days=wish.days, scope=scope
            )

    made, row = asyncio.run(work())
    if as_json:
        shown = MadeKey(
            key=made.text, prefix=row.prefix, tenant=row.tenant, scope=row.scope.value
        )
        console.print_json(msgspec.json.encode(shown).decode())
        return
    console.print(made.text, markup=False, highlight=False, soft_wrap=True)
    Console(stderr=True).print(
        "keep it: it is not shown again. From now on gateways ask for a key.",
        highlight=False,
        soft_wrap=True,
    )


def show_keys(
    settings: RoleSettings, tenant: str | None, *, as_json: bool, console: Console
) -> None:
    """Print keys by their beginning.

    Raises:
        NoCatalogError: it is away.
    """

    async def work() -> tuple[ApiKeyRow, ...]:
        async with open_tenancy(settings) as tenancy:
            return (await tenancy.catalog.access()).keys

    now_s = SystemClock().wall()
    rows = sorted(asyncio.run(work()), key=lambda row: (row.tenant, row.created_at_s))
    shown = [_shown(row, now_s) for row in rows if tenant in (None, row.tenant)]
    if as_json:
        console.print_json(msgspec.json.encode(shown).decode())
        return
    table = Table(box=None)
    for title in ("key", "tenant", "scope", "label", "state"):
        table.add_column(title)
    table.add_column("age in days", justify="right")
    for each in shown:
        table.add_row(
            f"{KEY_BEGINS}{each.prefix}_…",
            escape(each.tenant),
            each.scope,
            escape(each.label),
            each.state,
            f"{(now_s - each.created_at_s) / _DAY_S:.1f}",
        )
    console.print(table)


def revoke(settings: RoleSettings, prefix: str, console: Console) -> None:
    """Revoke one.

    Raises:
        TenancyError, NoCatalogError: it can't be done.
    """

    async def work() -> ApiKeyRow:
        async with open_tenancy(settings) as tenancy:
            return await tenancy.revoke_key(prefix)

    row = asyncio.run(work())
    text = f"key {KEY_BEGINS}{row.prefix}_… of {row.tenant} is revoked"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _shown(row: ApiKeyRow, now_s: float) -> ShownKey:
    state = "valid"
    if row.revoked_at_s is not None:
        state = "revoked"
    elif row.expires_at_s is not None and now_s >= row.expires_at_s:
        state = "expired"
    return ShownKey(
        prefix=row.prefix,
        tenant=row.tenant,
        scope=row.scope.value,
        label=row.label,
        state=state,
        created_at_s=row.created_at_s,
        expires_at_s=row.expires_at_s,
        revoked_at_s=row.revoked_at_s,
    )
