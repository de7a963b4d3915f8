"""``kvtide status``: the cluster as a conductor knows it."""

import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.bus.messages import (
    ConductorLoad,
    DecodeLoad,
    Failure,
    GatewayLoad,
    Load,
    NodeView,
    PrefillLoad,
    StatusQuery,
    StatusReply,
    StoreLoad,
)
from kvtide.cli.access import NoConductorError, ask_conductor, open_bus
from kvtide.cli.sizes import size
from kvtide.runtime.settings import RoleSettings


def show_status(settings: RoleSettings, *, as_json: bool, console: Console) -> None:
    """Ask and print.

    Raises:
        NoNatsError, NoConductorError: nobody answers.
    """
    reply = asyncio.run(_ask(settings))
    if as_json:
        console.print_json(msgspec.json.encode(reply).decode())
        return
    print_status(reply, console)


def print_status(reply: StatusReply, console: Console) -> None:
    """For people."""
    console.print(status_table(reply))
    console.print(summary(reply), highlight=False)


async def _ask(settings: RoleSettings) -> StatusReply:
    async with open_bus(settings) as bus:
        reply = await ask_conductor(bus, StatusQuery())
    if isinstance(reply, StatusReply):
        return reply
    reason = reply.reason if isinstance(reply, Failure) else type(reply).__name__
    message = f"the conductor did not answer with a status: {reason}"
    raise NoConductorError(message)


def summary(reply: StatusReply) -> str:
    """Load and cache in one line."""
    stores = [
        load
        for view in reply.nodes
        for load in view.beat.load
        if isinstance(load, StoreLoad)
    ]
    used = sum(load.used_bytes for load in stores)
    capacity = sum(load.capacity_bytes for load in stores)
    requests = sum(
        load.open_requests
        for view in reply.nodes
        for load in view.beat.load
        if isinstance(load, GatewayLoad)
    )
    catching_up = "" if reply.exact else ", index catching up"
    ssd_used = sum(load.ssd_used_bytes for load in stores)
    ssd_total = sum(load.ssd_total_bytes for load in stores)
    ssd = f", SSD {size(ssd_used)} of {size(ssd_total)}" if ssd_total else ""
    return (
        f"{requests} open requests; cache {size(used)} of {size(capacity)}{ssd}, "
        f"{reply.indexed_blocks} blocks in {reply.indexed_copies} copies{catching_up}"
    )


def status_table(reply: StatusReply) -> Table:
    """A row a node."""
    table = Table(box=None)
    for title in ("node", "roles", "state", "heard", "load", "host", "http"):
        table.add_column(title, overflow="fold")
    for view in sorted(reply.nodes, key=lambda view: view.beat.node.node):
        beat = view.beat
        table.add_row(
            escape(beat.node.node),
            ", ".join(beat.roles),
            beat.state,
            f"{view.age_ms / 1000:.1f} s ago",
            "; ".join(_load(load, view) for load in beat.load),
            beat.host[:8],
            escape(beat.http),
        )
    return table


def _load(load: Load, view: NodeView) -> str:
    match load:
        case PrefillLoad():
            return (
                f"{load.running} running, {load.queued} queued "
                f"({load.queued_tokens} tokens), {load.tokens_per_s:.0f} tokens/s"
            )
        case DecodeLoad():
            return (
                f"{load.running} running, {load.waiting} waiting, "
                f"{load.kv_tokens_used}/{load.kv_tokens_capacity} KV tokens, "
                f"{load.step_ms:.0f} ms/step"
            )
        case StoreLoad():
            return (
                f"{size(load.used_bytes)} of {size(load.capacity_bytes)}{_ssd(load)}, "
                f"{view.blocks} blocks, {load.leases} leases"
            )
        case GatewayLoad():
            return f"{load.open_requests} open requests"
        case ConductorLoad():
            return f"{load.indexed_blocks} blocks indexed, {load.bookings} bookings"


def _ssd(load: StoreLoad) -> str:
    if load.ssd_state == "off":
        return ""
    text = f", SSD {size(load.ssd_used_bytes)} of {size(load.ssd_total_bytes)}"
    if load.ssd_state == "ready":
        return text
    why = f": {load.ssd_reason}" if load.ssd_reason else ""
    return escape(f"{text} ({load.ssd_state.replace('_', ' ')}{why})")
