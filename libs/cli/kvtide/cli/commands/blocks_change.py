"""``kvtide blocks pin``, ``unpin`` and ``remove``: what people decide about blocks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from rich.console import Console

from kvtide.bus import load_secret
from kvtide.bus.interface import Bus
from kvtide.bus.messages import BlockSelector, PinBlocks, RemoveBlocks, UnpinBlocks
from kvtide.cli.access import open_bus
from kvtide.cli.block_names import BlockNames
from kvtide.cli.exits import CLEAN, FAILED
from kvtide.cli.sizes import size
from kvtide.cli.stores import (
    Change,
    Outcome,
    change_blocks,
    list_blocks,
    look_around,
)
from kvtide.kv import NodeId
from kvtide.runtime import ConfigError
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
    """How many copies are meant, where, and their bytes."""

    copies: int
    bytes: int
    stores: int


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

    ``confirm`` is asked before anything is removed; None: it is confirmed.

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
        console.print_json(msgspec.json.encode(done).decode())
    else:
        for each in done:
            _say(console, deed, each)
    return FAILED if any(each.error for each in done) else CLEAN


async def _change(
    settings: RoleSettings,
    deed: Deed,
    meant: Meant,
    *,
    hard: bool,
    seconds: float,
    confirm: Confirm | None,
) -> list[Outcome] | None:
    names = BlockNames(
        load_secret(settings.secret_file or settings.state_dir / "secret")
    )
    async with open_bus(settings) as bus:
        seen = await look_around(bus, meant.node)
        names.learn(models=seen.models)
        select = names.select(keys=meant.keys, tenant=meant.tenant, model=meant.model)
        stores = [beat.node.node for beat in seen.stores]
        if deed is Deed.REMOVE and confirm is not None:
            counted = await _count(bus, stores, select)
            text = (
                f"Remove {counted.copies} copies ({size(counted.bytes)}) of {meant} "
                f"at {counted.stores} stores?"
            )
            if not await asyncio.to_thread(confirm, text):
                return None
        message = _message(deed, select, hard=hard, seconds=seconds)
        return [await change_blocks(bus, node, message) for node in stores]


async def _count(bus: Bus, stores: list[NodeId], select: BlockSelector) -> Counted:
    copies = nbytes = 0
    nodes: set[NodeId] = set()
    async for node, listing in list_blocks(bus, stores, select):
        copies += 1
        nbytes += listing.located.slot.length
        nodes.add(node)
    return Counted(copies, nbytes, len(nodes))


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
    text = f"{outcome.node}: {outcome.changed} of {outcome.matched} {done}"
    if outcome.refused:
        text += f", {outcome.refused} refused"
    if outcome.error:
        text += f"; {outcome.error}"
    console.print(text, markup=False, highlight=False)
