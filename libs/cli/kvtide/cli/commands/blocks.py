"""``kvtide blocks list`` and ``show``: what is in the pool, and where."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.bus import load_secret
from kvtide.bus.interface import Bus
from kvtide.bus.messages import BlockSelector
from kvtide.catalog import (
    Catalog,
    CatalogError,
    RemovalQuery,
    RemovalRow,
    catalog_url,
    is_missing,
)
from kvtide.cli.access import NoNatsError, open_bus
from kvtide.cli.block_names import BlockNames, key_range
from kvtide.cli.found_blocks import (
    CATALOG_LIMIT_S,
    NoCatalogError,
    ShownBlock,
    Source,
    Wanted,
    catalog_keys,
    from_catalog,
    from_stores,
)
from kvtide.cli.sizes import size
from kvtide.cli.stores import NoStoreError, Seen, keys_between, look_around
from kvtide.kv import KEY_BYTES, BlockKey, NodeId, TenantId
from kvtide.runtime import ConfigError, SystemClock
from kvtide.runtime.settings import RoleSettings

HISTORY = 10
WIDE = 1000
ROWS = 1000
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


@dataclass(frozen=True, slots=True)
class Asked:
    """Names as they were given; see ``Wanted`` for the rest."""

    wanted: Wanted
    tenant: str | None = None
    model: str | None = None
    key: str | None = None
    source: Source = Source.AUTO


class BlockList(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and where it was looked up."""

    source: str
    blocks: tuple[ShownBlock, ...]
    note: str = ""


def list_found(
    settings: RoleSettings, asked: Asked, *, as_json: bool, console: Console
) -> None:
    """Find blocks and print them.

    Raises:
        NoCatalogError, NoNatsError, NoStoreError: nobody can say.
        ConfigError: a name or key that is none.
    """
    found = asyncio.run(_find(settings, asked))
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
        return
    _say(console, found)
    print_blocks(console, found.blocks)


def show_one(
    settings: RoleSettings, text: str, *, as_json: bool, console: Console
) -> int:
    """Print all copies of one block, and which went lately; 1 if there is nothing.

    Raises:
        NoCatalogError, NoNatsError, NoStoreError: nobody can say.
        ConfigError: it is no key, and not the beginning of one block's alone.
    """
    key = asyncio.run(_whole_key(settings, text))
    wanted = Wanted(BlockSelector(), limit=1000)
    asked = Asked(wanted, key=key.hex(), source=Source.STORES)
    try:
        found = asyncio.run(_find(settings, asked))
    except (NoNatsError, NoStoreError) as error:
        found = asyncio.run(_find(settings, replace(asked, source=Source.CATALOG)))
        found = msgspec.structs.replace(found, note=f"{error}; this is the catalog's")
    gone = asyncio.run(_removals(settings, key))
    if as_json:
        shown = {"source": found.source, "blocks": found.blocks, "removals": gone}
        console.print_json(msgspec.json.encode(shown).decode())
    else:
        _say(console, found)
        print_blocks(console, found.blocks)
        _print_removals(console, gone)
    return 0 if found.blocks or gone else 1


async def _whole_key(settings: RoleSettings, text: str) -> BlockKey:
    """A key by its beginning, if one block's alone begins so."""
    first, last = key_range(text)
    if first == last:
        return first
    async with AsyncExitStack() as stack:
        bus, missing = await _live(stack, settings)
        found: set[BlockKey] | None = None
        if bus is not None:
            try:
                stores = _of(await look_around(bus), None)
                found = await keys_between(bus, stores, first, last, HISTORY)
            except NoStoreError as error:
                missing = str(error)
        if found is None:
            try:
                found = await catalog_keys(settings, first, last, ROWS)
            except NoCatalogError as error:
                raise NoStoreError(f"{missing}; {error}") from error
    if len(found) == 1:
        return found.pop()
    if not found:
        message = f"no block's key begins with {text}; name one that went in full"
    else:
        keys = ", ".join(sorted(key.hex() for key in found))
        message = f"the keys of several blocks begin with {text}: {keys}"
    raise ConfigError(message, key="key")


async def _find(settings: RoleSettings, asked: Asked) -> BlockList:
    names = BlockNames(
        load_secret(settings.secret_file or settings.state_dir / "secret")
    )
    async with AsyncExitStack() as stack:
        bus, missing = await _live(stack, settings)
        seen: Seen | None = None
        if bus is not None:
            try:
                seen = await look_around(bus)
            except NoStoreError as error:
                missing = str(error)
            else:
                names.learn(models=seen.models)
        keys = () if asked.key is None else (asked.key,)
        select = names.select(keys=keys, tenant=asked.tenant, model=asked.model)
        if asked.tenant is not None:
            names.learn(tenants=[TenantId(asked.tenant)])
        wanted = replace(asked.wanted, select=select)
        note = ""
        if asked.source is not Source.STORES:
            try:
                wall_s = SystemClock().wall()
                blocks = await from_catalog(settings, names, wanted, wall_s)
                if not blocks and seen is not None:
                    # a store that is down may have rows; one without is a slip
                    _of(seen, wanted.node)
                return BlockList(source="catalog", blocks=tuple(blocks))
            except NoCatalogError as error:
                if asked.source is Source.CATALOG:
                    raise
                note = f"{error}; these are from the live stores"
        if bus is None or seen is None:
            raise NoStoreError("; ".join(part for part in (note, missing) if part))
        stores = _of(seen, wanted.node)
        blocks = await from_stores(bus, stores, names, wanted)
        return BlockList(source="stores", blocks=tuple(blocks), note=note)


def _of(seen: Seen, node: NodeId | None) -> list[NodeId]:
    names = [beat.node.node for beat in seen.stores]
    if node is None:
        return names
    if node not in names:
        live = ", ".join(names) or "none"
        message = f"no store {node!r} is live; those that are: {live}"
        raise ConfigError(message, key="node")
    return [node]


async def _live(
    stack: AsyncExitStack, settings: RoleSettings
) -> tuple[Bus | None, str]:
    """A connection, or why there is none."""
    try:
        return await stack.enter_async_context(open_bus(settings)), ""
    except NoNatsError as error:
        return None, str(error)


async def _removals(settings: RoleSettings, key: BlockKey) -> tuple[RemovalRow, ...]:
    """Which copies went lately; a catalog that is away has none."""
    url = catalog_url(settings.catalog, settings.state_dir)
    if is_missing(url):
        return ()
    try:
        async with asyncio.timeout(CATALOG_LIMIT_S), Catalog.open(url) as catalog:
            return await catalog.removals(RemovalQuery(key=key, limit=HISTORY))
    except (CatalogError, TimeoutError):
        return ()


# ---- for people


def print_blocks(console: Console, blocks: tuple[ShownBlock, ...]) -> None:
    """Every copy in full, a line each; what is wider than a terminal goes on below."""
    # a width asked of ``print`` can't exceed the console's
    wide = Console(file=console.file, width=WIDE)
    wide.print(block_table(blocks), crop=False, no_wrap=True)


def block_table(blocks: tuple[ShownBlock, ...]) -> Table:
    """One copy a row."""
    table = Table(box=None)
    table.add_column("key", no_wrap=True, min_width=2 * KEY_BYTES)
    for title in ("node", "tier", "tenant", "model"):
        table.add_column(title, overflow="fold")
    for title in ("tokens", "size", "uses", "age", "idle"):
        table.add_column(title, justify="right")
    table.add_column("kept")
    for block in blocks:
        kept = [f"pinned {block.pinned}"] if block.pinned else []
        kept += ["extra"] if block.extra else []
        table.add_row(
            block.key,
            *(escape(text) for text in (block.node, block.tier)),
            *(escape(text) for text in (block.tenant, block.model)),
            str(block.tokens),
            size(block.bytes),
            str(block.uses),
            span(block.age_s),
            span(block.idle_s),
            ", ".join(kept),
        )
    return table


def span(seconds: float | None) -> str:
    """A time span, short."""
    if seconds is None:
        return "-"
    for unit_s, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def _say(console: Console, found: BlockList) -> None:
    if found.note:
        console.print(found.note, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{len(found.blocks)} copies, as the {found.source} know them"
        if found.source == "stores"
        else f"{len(found.blocks)} copies, from the catalog",
        highlight=False,
    )


def _print_removals(console: Console, gone: tuple[RemovalRow, ...]) -> None:
    now_s = SystemClock().wall()
    for row in gone:
        ago = span(max(0.0, now_s - row.gone_at_s))
        text = f"went from {row.node} ({row.tier.value}) {ago} ago: {row.reason}"
        console.print(text, markup=False, highlight=False)
