"""``kvtide drain NODE``: a store moves what only it has, then leaves."""

import asyncio
from collections.abc import Callable

from rich.console import Console

from kvtide.bus.interface import Bus
from kvtide.bus.messages import (
    DrainBegin,
    DrainCancel,
    DrainPhase,
    DrainQuery,
    DrainState,
    Message,
)
from kvtide.cli.access import open_bus
from kvtide.cli.exits import CLEAN, FAILED
from kvtide.cli.sizes import size
from kvtide.cli.stores import NoStoreError, ask_store, look_around
from kvtide.kv import NodeId
from kvtide.runtime.settings import RoleSettings

POLL_S = 0.3
SILENT_TRIES = 5
NO_ROOM_TRIES = 10
"""Others may be slow to tell of their room."""


def drain(
    settings: RoleSettings,
    node: str,
    *,
    force: bool,
    wait: bool,
    console: Console,
) -> int:
    """Begin the drain of ``node`` and follow it; 0 once the store has left.

    1: there is no room for what it has; it goes on trying, and serving, until there is,
    until it is forced, or until it is cancelled. Without ``wait`` it is only begun.

    Raises:
        NoNatsError, NoStoreError: nobody answers.
    """
    return asyncio.run(_drain(settings, node, force=force, wait=wait, console=console))


def cancel(settings: RoleSettings, node: str, console: Console) -> int:
    """Have ``node`` stay after all.

    Raises:
        NoNatsError, NoStoreError: nobody answers.
    """

    async def run() -> None:
        async with open_bus(settings) as bus:
            await look_around(bus, node)
            await _ask(bus, NodeId(node), DrainCancel())

    asyncio.run(run())
    console.print(f"{node} stays", highlight=False)
    return CLEAN


async def _drain(
    settings: RoleSettings, node: str, *, force: bool, wait: bool, console: Console
) -> int:
    name = NodeId(node)
    async with open_bus(settings) as bus:
        await look_around(bus, node)
        state = await _ask(bus, name, DrainBegin(force=force))
        if not wait:
            console.print(describe(node, state), highlight=False)
            return CLEAN
        return await _follow(
            bus, name, lambda text: console.print(text, highlight=False)
        )


async def _follow(bus: Bus, node: NodeId, say: Callable[[str], None]) -> int:
    said, silent, full = "", 0, 0
    state = DrainState(phase=DrainPhase.LOOKING)
    while True:
        try:
            state = await _ask(bus, node, DrainQuery())
            silent = 0
        except NoStoreError:
            silent += 1
            if state.phase is DrainPhase.LEAVING or silent >= SILENT_TRIES:
                break
        if state.phase is DrainPhase.IDLE:
            say(f"{node}: the drain was cancelled")
            return FAILED
        text = describe(node, state)
        if text != said:
            said = text
            say(text)
        if state.phase is DrainPhase.DRAINED:
            return CLEAN
        full = full + 1 if state.phase is DrainPhase.NO_ROOM else 0
        if full >= NO_ROOM_TRIES:
            say(stuck(node))
            return FAILED
        await asyncio.sleep(POLL_S)
    if state.phase is not DrainPhase.LEAVING:
        raise NoStoreError(
            f"{node} was lost in mid-drain, with {state.left} blocks left"
        )
    say(f"{node} has left")
    return CLEAN


async def _ask(bus: Bus, node: NodeId, message: Message) -> DrainState:
    reply = await ask_store(bus, node, message)
    if not isinstance(reply, DrainState):
        raise NoStoreError(f"{node} answered with {type(reply).__name__}")
    return reply


def stuck(node: str) -> str:
    """What it means that there is no room, and what to do."""
    return (
        f"{node} goes on serving what it has, and moves it as soon as there is room; "
        f"until then workers on its host pool nothing new. "
        f"'kvtide drain {node} --cancel' has it stay, '--force' leaves blocks behind"
    )


def describe(node: str, state: DrainState) -> str:
    """One line."""
    moved = f"{state.moved} moved ({size(state.moved_bytes)})"
    left = f"{state.left} left ({size(state.left_bytes)})"
    match state.phase:
        case DrainPhase.IDLE:
            text = "is not draining"
        case DrainPhase.LOOKING:
            text = "looks which blocks only it has"
        case DrainPhase.MOVING:
            text = f"moves blocks: {moved}, {left}"
        case DrainPhase.NO_ROOM:
            text = f"is stuck: {moved}, {left}: {state.reason}"
        case DrainPhase.FINISHING:
            text = f"waits: {state.reason}"
        case DrainPhase.LEAVING:
            text = f"leaves: {moved}, {left}"
        case DrainPhase.DRAINED:
            text = (
                "has left; started again it stays out until 'kvtide drain "
                f"{node} --cancel'"
            )
    return f"{node} {text}"
