"""``kvtide blocks history``: what was hit over time, and what went and why."""

import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.catalog import (
    Catalog,
    CatalogError,
    HitQuery,
    HitRate,
    RemovalCount,
    catalog_url,
    is_missing,
)
from kvtide.cli.found_blocks import CATALOG_LIMIT_S, NoCatalogError
from kvtide.cli.sizes import size
from kvtide.kv import TenantId
from kvtide.runtime import SystemClock
from kvtide.runtime.settings import RoleSettings, hide_passwords


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that ended, and of the copies that went, since then."""

    hits: tuple[HitRate, ...]
    removals: tuple[RemovalCount, ...]


def show_history(
    settings: RoleSettings,
    *,
    hours: float,
    steps: int,
    tenant: str | None,
    as_json: bool,
    console: Console,
) -> None:
    """Read the catalog and print both.

    Raises:
        NoCatalogError: it is away.
    """
    found = asyncio.run(_read(settings, hours, steps, tenant))
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
        return
    console.print(_hits(found.hits))
    console.print(_removals(found.removals))


async def _read(
    settings: RoleSettings, hours: float, steps: int, tenant: str | None
) -> History:
    url = catalog_url(settings.catalog, settings.state_dir)
    if is_missing(url):
        raise NoCatalogError("there is no catalog at " + url.partition(":///")[2])
    until_s = SystemClock().wall()
    since_s = until_s - hours * 3600
    query = HitQuery(
        since_s=since_s,
        until_s=until_s,
        step_s=max(1.0, hours * 3600 / steps),
        tenant=None if tenant is None else TenantId(tenant),
    )
    try:
        async with asyncio.timeout(CATALOG_LIMIT_S), Catalog.open(url) as catalog:
            return History(
                hits=await catalog.hit_rates(query),
                removals=await catalog.removal_counts(since_s=since_s),
            )
    except (CatalogError, TimeoutError) as error:
        why = hide_passwords(str(error)) or "it does not answer"
        raise NoCatalogError(f"the catalog can't be read: {why}") from error


def _hits(hits: tuple[HitRate, ...]) -> Table:
    table = Table(box=None, title="requests that ended", title_justify="left")
    table.add_column("from")
    for title in ("requests", "with a hit", "tokens", "cached", "DRAM", "SSD"):
        table.add_column(title, justify="right")
    now_s = SystemClock().wall()
    for each in hits:
        tokens = each.prompt_tokens
        table.add_row(
            f"{max(0.0, now_s - each.start_s) / 60:.0f} min ago",
            str(each.requests),
            _share(each.hit_requests, each.requests),
            str(tokens),
            _share(each.cached_tokens, tokens),
            _share(each.dram_tokens, tokens),
            _share(each.ssd_tokens, tokens),
        )
    return table


def _removals(removals: tuple[RemovalCount, ...]) -> Table:
    table = Table(box=None, title="copies that went", title_justify="left")
    for title in ("node", "tier", "why"):
        table.add_column(title)
    for title in ("copies", "size"):
        table.add_column(title, justify="right")
    for each in removals:
        table.add_row(
            escape(each.node),
            each.tier.value,
            escape(each.reason),
            str(each.blocks),
            size(each.bytes),
        )
    return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
