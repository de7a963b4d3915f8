"""``kvtide blocks pin``, ``unpin`` and ``remove``: what people decide about blocks."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec
from rich.console import Console

from kvtide.bus import load_secret
from kvtide.bus.interface import Bus
from kvtide.bus.messages import BlockSelector, PinBlocks, RemoveBlocks, UnpinBlocks
from kvtide.cli.access import NoNatsError, open_bus
from kvtide.cli.block_names import BlockNames
from kvtide.cli.exits import CLEAN, FAILED
from kvtide.cli.found_blocks import NoCatalogError
from kvtide.cli.sizes import size
from kvtide.cli.stores import (
    Change,
    NoStoreError,
    Outcome,
    Seen,
    change_blocks,
    list_blocks,
    listen,
)
from kvtide.cli.tombstone import keep_tombstone
from kvtide.kv import BlockKey, NodeId
from kvtide.runtime import ConfigError, SystemClock
from kvtide.runtime.settings import RoleSettings

Confirm = Callable[[str], bool]
"""Asks a person; false: leave all as it is."""


class Deed(StrEnum):
    """What to do."""

    PIN = "pin"
    UNPIN = "unpin"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Meant:
    """Which blocks, by name; everything that is given must hold."""

    keys: tuple[str, ...] = ()
    tenant: str | None = None
    model: str | None = None
    node: str | None = None

    def __str__(self) -> str:
        """For people."""
        parts = [f"block {key}" for key in self.keys]
        parts += [f"tenant {self.tenant}"] if self.tenant is not None else []
        parts += [f"model {self.model}"] if self.model is not None else []
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Counted:
    """How many blocks and copies are meant, at how many stores, and their bytes."""

    blocks: int
    copies: int
    bytes: int
    stores: int

    def __str__(self) -> str:
        """For people."""
        return f"{self.blocks} blocks, {self.copies} copies ({size(self.bytes)})"


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it at each live store.

    Not ``lasting``: a store that is down may bring back what it has. ``note`` says so.
    ``unheard``: stores that the catalog knows and that were not there; each does it when
    it starts, or soon after it reaches the cluster again.
    """

    stores: tuple[Outcome, ...]
    unheard: tuple[NodeId, ...] = ()
    lasting: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Who is there; without a connection or a store, ``nobody`` says why."""

    bus: Bus | None
    seen: Seen
    nobody: str = ""


def change(
    settings: RoleSettings,
    deed: Deed,
    meant: Meant,
    *,
    hard: bool = False,
    seconds: float = 0.0,
    confirm: Confirm | None = None,
    as_json: bool,
    console: Console,
) -> int:
    """Do it at every live store, and say what came of it; 1 if a store failed.

    What is removed at all stores is noted in the catalog first, for
    the stores that are down; where it can't be, that is said, and it is 1. ``confirm``
    is asked before anything is removed; None: it is confirmed.

    Raises:
        ConfigError: nothing is named, or a name is none.
        NoNatsError, NoStoreError: nobody is there to do it.
    """
    if not meant.keys and meant.tenant is None and meant.model is None:
        raise ConfigError(
            "name the blocks: keys, --tenant or --model; all blocks at once are never "
            "meant",
            key="blocks",
        )
    done = asyncio.run(
        _change(settings, deed, meant, hard=hard, seconds=seconds, confirm=confirm)
    )
    if done is None:
        console.print("nothing was changed", highlight=False)
        return FAILED
    if as_json:
        shown = done if deed is Deed.REMOVE else done.stores
        console.print_json(msgspec.json.encode(shown).decode())
    else:
        for each in done.stores:
            _say(console, deed, each)
        if done.note:
            console.print(done.note, markup=False, highlight=False, soft_wrap=True)
    failed = not done.lasting or any(each.error for each in done.stores)
    return FAILED if failed else CLEAN


async def _change(
    settings: RoleSettings,
    deed: Deed,
    meant: Meant,
    *,
    hard: bool,
    seconds: float,
    confirm: Confirm | None,
) -> Changed | None:
    names = BlockNames(
        load_secret(settings.secret_file or settings.state_dir / "secret")
    )
    async with AsyncExitStack() as stack:
        pool = await _look(stack, settings)
        # whose a key is, is not known of a store that is down
        narrowed = meant.keys and (meant.tenant is not None or meant.model is not None)
        everywhere = deed is Deed.REMOVE and meant.node is None and not narrowed
        if not everywhere:
            pool = _present(pool, meant.node)
        names.learn(models=pool.seen.models)
        select = names.select(keys=meant.keys, tenant=meant.tenant, model=meant.model)
        if deed is Deed.REMOVE and confirm is not None:
            counted = await _count(pool, select)
            text = f"Remove {counted} of {meant} at {counted.stores} live stores?"
            if not await asyncio.to_thread(confirm, text):
                return None
        # before the stores are asked: one that stops meanwhile hears of it, too
        kept = await _keep(settings, pool, select) if everywhere else Changed(stores=())
        message = _message(deed, select, hard=hard, seconds=seconds)
        outcomes = [
            await change_blocks(pool.bus, beat.node.node, message)
            for beat in pool.seen.stores
            if pool.bus is not None
        ]
        return msgspec.structs.replace(kept, stores=tuple(outcomes))


async def _look(stack: AsyncExitStack, settings: RoleSettings) -> _Pool:
    try:
        bus = await stack.enter_async_context(open_bus(settings))
    except NoNatsError as error:
        return _Pool(None, Seen((), ()), str(error))
    seen = await listen(bus)
    nobody = f"no store is live in cluster {bus.subjects.cluster!r}"
    return _Pool(bus, seen, "" if seen.stores else nobody)


def _present(pool: _Pool, node: str | None) -> _Pool:
    """The stores that are meant, at least one."""
    if pool.bus is None:
        raise NoNatsError(pool.nobody)
    if node is not None:
        return replace(pool, seen=Seen((pool.seen.named(node),), pool.seen.models))
    if pool.nobody:
        raise NoStoreError(pool.nobody)
    return pool


async def _keep(settings: RoleSettings, pool: _Pool, select: BlockSelector) -> Changed:
    """Have stores that are down or cut off forget these blocks when they are back.

    Raises:
        NoStoreError: nobody hears of it, now or later.
    """
    try:
        known = await keep_tombstone(settings, select, SystemClock().wall())
    except NoCatalogError as error:
        if pool.nobody:
            raise NoStoreError(f"{pool.nobody}; {error}: nothing is removed") from error
        note = f"{error}: only live stores heard of it, one that is down will bring "
        note += "its blocks back; remove them again when the catalog is there"
        return Changed(stores=(), lasting=False, note=note)
    there = {beat.node.node for beat in pool.seen.stores}
    unheard = tuple(node for node in known if node not in there)
    note = f"{pool.nobody}: " if pool.nobody else ""
    if unheard:
        note += f"not heard of: {', '.join(unheard)}; "
    if note:
        note += "stores forget these blocks when they start or reach the cluster again"
    return Changed(stores=(), unheard=unheard, note=note)


async def _count(pool: _Pool, select: BlockSelector) -> Counted:
    copies = nbytes = 0
    keys: set[BlockKey] = set()
    nodes: set[NodeId] = set()
    stores = [beat.node.node for beat in pool.seen.stores]
    if pool.bus is None:
        return Counted(0, 0, 0, 0)
    async for node, listing in list_blocks(pool.bus, stores, select):
        copies += 1
        nbytes += listing.located.slot.length
        keys.add(listing.located.key)
        nodes.add(node)
    return Counted(len(keys), copies, nbytes, len(nodes))


def _message(
    deed: Deed, select: BlockSelector, *, hard: bool, seconds: float
) -> Change:
    match deed:
        case Deed.PIN:
            return PinBlocks(select=select, hard=hard, seconds=seconds)
        case Deed.UNPIN:
            return UnpinBlocks(select=select)
        case Deed.REMOVE:
            return RemoveBlocks(select=select)


def _say(console: Console, deed: Deed, outcome: Outcome) -> None:
    done = {Deed.PIN: "pinned", Deed.UNPIN: "unpinned", Deed.REMOVE: "removed"}[deed]
    text = f"{outcome.node}: {outcome.changed} of {outcome.matched} blocks {done}"
    if deed is Deed.REMOVE:
        text += f", {outcome.copies} copies"
    if outcome.refused:
        text += f", {outcome.refused} refused"
    if outcome.error:
        text += f"; {outcome.error}"
    console.print(text, markup=False, highlight=False)
