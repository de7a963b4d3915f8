"""``kvtide audit``: what was done to tenants and keys, and keys that failed."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.catalog import AuditQuery, AuditRow
from kvtide.cli.tenancy_desk import open_tenancy
from kvtide.runtime import SystemClock
from kvtide.runtime.settings import RoleSettings


@dataclass(frozen=True, slots=True)
class AuditWish:
    """Which entries; None is all."""

    limit: int
    hours: float | None
    action: str | None


def show_audit(
    settings: RoleSettings, wish: AuditWish, *, as_json: bool, console: Console
) -> None:
    """Print entries, the newest first.

    Raises:
        NoCatalogError: it is away.
    """
    since_s = None
    if wish.hours is not None:
        since_s = SystemClock().wall() - wish.hours * 3600
    query = AuditQuery(limit=wish.limit, since_s=since_s, action=wish.action)

    async def work() -> tuple[AuditRow, ...]:
        async with open_tenancy(settings) as tenancy:
            return await tenancy.catalog.audit(query)

    rows = asyncio.run(work())
    if as_json:
        console.print_json(msgspec.json.encode(rows).decode())
        return
    table = Table(box=None)
    for title in ("when (UTC)", "who", "what", "to what", "outcome", "detail"):
        table.add_column(title)
    for row in rows:
        when = datetime.fromtimestamp(row.at_s, UTC)
        table.add_row(
            f"{when:%Y-%m-%d %H:%M:%S}",
            *(
                escape(text)
                for text in (
                    row.actor,
                    row.action,
                    row.target,
                    row.outcome,
                    row.detail,
                )
            ),
        )
    console.print(table)
