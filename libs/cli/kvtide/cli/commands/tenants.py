"""``kvtide tenants``: who may use the system, and how much of it."""

import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.bus import load_secret
from kvtide.catalog import OPERATORS, Access, Limits, QuotaRow, TenantRow
from kvtide.cli.commands.blocks_change import Deed, Meant, change as change_blocks
from kvtide.cli.exits import CLEAN, FAILED
from kvtide.cli.stores import NoStoreError
from kvtide.cli.tenancy_desk import open_tenancy
from kvtide.kv import TenantId, tenant_tag
from kvtide.runtime import ConfigError
from kvtide.runtime.settings import RoleSettings


class ShownTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant for people and scripts; None is no limit."""

    tenant: str
    title: str
    share: str
    keys: int
    requests_per_min: int | None
    tokens_per_min: int | None
    concurrent_requests: int | None
    deleted: bool


def add(
    settings: RoleSettings,
    name: str,
    title: str,
    share: str,
    limits: Limits,
    console: Console,
) -> None:
    """Add one.

    Raises:
        TenancyError, NoCatalogError, ConfigError: it can't be done.
    """

    async def work() -> TenantRow:
        async with open_tenancy(settings) as tenancy:
            return await tenancy.add_tenant(
                name, title=title, share=share, limits=limits
            )

    row = asyncio.run(work())
    _say(console, f"tenant {row.tenant} is there; make a key: kvtide keys make {name}")


def change(
    settings: RoleSettings,
    name: str,
    share: str | None,
    limits: Limits,
    console: Console,
) -> None:
    """Replace its limits.

    Raises:
        TenancyError, NoCatalogError, ConfigError: it can't be done.
    """

    async def work() -> QuotaRow:
        async with open_tenancy(settings) as tenancy:
            return await tenancy.set_tenant(name, share=share, limits=limits)

    quota = asyncio.run(work())
    _say(console, f"tenant {quota.tenant}: {limits}")


def delete(settings: RoleSettings, name: str, console: Console) -> int:
    """End it, here and at the live stores; 1 if a store failed.

    The key that its blocks are encrypted with on SSDs is destroyed first, so that a
    store that is down can't read what it still has.

    Raises:
        TenancyError, NoCatalogError, ConfigError: it can't be done.
    """
    path = (settings.secret_file or settings.state_dir / "secret").expanduser()
    # a new one would name another tenant's key and blocks, and nobody would notice
    if not path.is_file():
        raise ConfigError(
            f"the cluster's secret {path} is not here: without it the tenant's key and "
            "blocks can't be named (KVTIDE_SECRET_FILE, or secret_file in --config)",
            key="secret_file",
        )
    secret = load_secret(path)
    tag = tenant_tag(secret, TenantId(name))

    async def work() -> int:
        async with open_tenancy(settings) as tenancy:
            return await tenancy.delete_tenant(name, tag)

    keys = asyncio.run(work())
    _say(console, f"tenant {name} is deleted, {keys} keys are revoked")
    try:
        return change_blocks(
            settings,
            Deed.REMOVE,
            Meant(tenant=name),
            as_json=False,
            console=console,
        )
    except NoStoreError as error:
        _say(console, f"{error}")
        return FAILED
    return CLEAN


def show_tenants(settings: RoleSettings, *, as_json: bool, console: Console) -> None:
    """Print them.

    Raises:
        NoCatalogError: it is away.
    """

    async def work() -> Access:
        async with open_tenancy(settings) as tenancy:
            return await tenancy.catalog.access()

    shown = _shown(asyncio.run(work()))
    if as_json:
        console.print_json(msgspec.json.encode(shown).decode())
        return
    table = Table(box=None)
    for title in ("tenant", "title", "shares", "keys"):
        table.add_column(title)
    for title in ("requests/min", "tokens/min", "at once"):
        table.add_column(title, justify="right")
    for each in shown:
        name = f"{each.tenant} (deleted)" if each.deleted else each.tenant
        table.add_row(
            escape(name),
            escape(each.title),
            escape(each.share) or "-",
            str(each.keys),
            _limit(each.requests_per_min),
            _limit(each.tokens_per_min),
            _limit(each.concurrent_requests),
        )
    console.print(table)


def _shown(access: Access) -> list[ShownTenant]:
    quotas = {quota.tenant: quota for quota in access.quotas}
    shown: list[ShownTenant] = []
    for row in access.tenants:
        if row.tenant == OPERATORS:
            continue
        quota = quotas.get(row.tenant, QuotaRow(row.tenant))
        keys = [
            key
            for key in access.keys
            if key.tenant == row.tenant and key.revoked_at_s is None
        ]
        shown.append(
            ShownTenant(
                tenant=row.tenant,
                title=row.name,
                share=row.share,
                keys=len(keys),
                requests_per_min=quota.requests_per_min,
                tokens_per_min=quota.tokens_per_min,
                concurrent_requests=quota.concurrent_requests,
                deleted=row.deleted_at_s is not None,
            )
        )
    return shown


def _limit(value: int | None) -> str:
    return "-" if value is None else str(value)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
