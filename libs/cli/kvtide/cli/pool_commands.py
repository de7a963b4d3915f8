"""``kvtide blocks`` and ``kvtide drain``: names and flags."""

import sys
from typing import Annotated

import typer

from kvtide.cli.exits import leave
from kvtide.cli.flags import CatalogUrl, Cluster, Config, Json, Nats, StateDir

blocks_app = typer.Typer(
    help="Look at the blocks of the pool, keep them, and remove them.",
    no_args_is_help=True,
)

Node = Annotated[str | None, typer.Option(help="This store only.", show_default=False)]
Tenant = Annotated[
    str | None, typer.Option(help="Its blocks only.", show_default=False)
]
Model = Annotated[
    str | None, typer.Option(help="Its blocks only: name or tag.", show_default=False)
]
Keys = Annotated[
    list[str] | None, typer.Argument(help="Keys as 'blocks list' shows them.")
]


@blocks_app.command("list")
def list_blocks(
    tenant: Tenant = None,
    model: Model = None,
    node: Node = None,
    tier: Annotated[str | None, typer.Option(help="dram or ssd.")] = None,
    older: Annotated[
        float | None, typer.Option(help="Stored longer ago, in seconds.")
    ] = None,
    idle: Annotated[
        float | None, typer.Option(help="Not wanted for so many seconds.")
    ] = None,
    least_uses: Annotated[
        int | None, typer.Option(help="Wanted at least so often.", min=0)
    ] = None,
    order: Annotated[
        str, typer.Option(help="key, hottest, oldest, newest or idle.")
    ] = "key",
    limit: Annotated[int, typer.Option(help="At most.", min=1, max=10_000)] = 50,
    source: Annotated[
        str,
        typer.Option(help="catalog, stores, or auto: the stores without a catalog."),
    ] = "auto",
    config: Config = None,
    nats: Nats = None,
    catalog: CatalogUrl = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List copies of blocks, by what they belong to, age and use."""
    from kvtide.bus.messages import BlockSelector  # noqa: PLC0415
    from kvtide.catalog import BlockOrder  # noqa: PLC0415
    from kvtide.cli.commands.blocks import Asked, list_found  # noqa: PLC0415
    from kvtide.cli.found_blocks import Source, Wanted  # noqa: PLC0415
    from kvtide.cli.options import chosen  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415
    from kvtide.kv import NodeId, Tier  # noqa: PLC0415

    flags = {
        "nats": nats,
        "catalog": catalog,
        "cluster": cluster,
        "state_dir": state_dir,
    }

    def asked() -> Asked:
        wanted = Wanted(
            BlockSelector(),
            node=None if node is None else NodeId(node),
            tier=None if tier is None else chosen(Tier, tier, "tier"),
            older_s=older,
            idle_s=idle,
            least_uses=least_uses,
            order=chosen(BlockOrder, order, "order"),
            limit=limit,
        )
        given = chosen(Source, source, "source")
        return Asked(wanted, tenant=tenant, model=model, source=given)

    leave(
        lambda console: list_found(
            resolve_look(config, flags), asked(), as_json=json, console=console
        )
    )


@blocks_app.command("show")
def show(
    key: Annotated[str, typer.Argument(help="A key as 'blocks list' shows it.")],
    config: Config = None,
    nats: Nats = None,
    catalog: CatalogUrl = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Show one block: its copies, what keeps them, and which went lately and why."""
    from kvtide.cli.commands.blocks import show_one  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {
        "nats": nats,
        "catalog": catalog,
        "cluster": cluster,
        "state_dir": state_dir,
    }
    leave(
        lambda console: show_one(
            resolve_look(config, flags), key, as_json=json, console=console
        )
    )


@blocks_app.command("history")
def history(
    hours: Annotated[float, typer.Option(help="How far back.", min=0.01)] = 1.0,
    steps: Annotated[int, typer.Option(help="Rows of hit rates.", min=1)] = 12,
    tenant: Annotated[
        str | None, typer.Option(help="Its requests only.", show_default=False)
    ] = None,
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Show hit rates over time, by request and tier, and what went and why."""
    from kvtide.cli.commands.blocks_history import show_history  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"catalog": catalog, "state_dir": state_dir}
    leave(
        lambda console: show_history(
            resolve_look(config, flags),
            hours=hours,
            steps=steps,
            tenant=tenant,
            as_json=json,
            console=console,
        )
    )


@blocks_app.command("pin")
def pin(
    keys: Keys = None,
    tenant: Tenant = None,
    model: Model = None,
    node: Node = None,
    hard: Annotated[
        bool, typer.Option("--hard", help="For good, not only while there is room.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="How long, without --hard.", min=0)
    ] = 3600.0,
    config: Config = None,
    nats: Nats = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Keep blocks in DRAM."""
    flags = {"nats": nats, "cluster": cluster, "state_dir": state_dir}
    meant = (tuple(keys or ()), tenant, model, node)
    _change("pin", meant, config, flags, json=json, hard=hard, seconds=seconds)


@blocks_app.command("unpin")
def unpin(
    keys: Keys = None,
    tenant: Tenant = None,
    model: Model = None,
    node: Node = None,
    config: Config = None,
    nats: Nats = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Let blocks go again that were pinned."""
    flags = {"nats": nats, "cluster": cluster, "state_dir": state_dir}
    _change("unpin", (tuple(keys or ()), tenant, model, node), config, flags, json=json)


@blocks_app.command("remove")
def remove(
    keys: Keys = None,
    tenant: Tenant = None,
    model: Model = None,
    node: Node = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: Config = None,
    nats: Nats = None,
    catalog: CatalogUrl = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Remove blocks of a tenant or model, or single ones. Asks first.

    Stores that are down hear of it through the catalog when they start; with --node,
    and of keys together with --tenant or --model, only live stores do.
    """
    flags = {
        "nats": nats,
        "catalog": catalog,
        "cluster": cluster,
        "state_dir": state_dir,
    }
    meant = (tuple(keys or ()), tenant, model, node)
    _change("remove", meant, config, flags, json=json, yes=yes)


def drain(
    node: Annotated[str, typer.Argument(help="The store's name.")],
    force: Annotated[
        bool, typer.Option("--force", help="Leave behind what nobody has room for.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Have it stay after all.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Follow it to its end.")
    ] = True,
    config: Config = None,
    nats: Nats = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
) -> None:
    """Have a store move what only it has to others, then leave; nothing is lost."""
    from kvtide.cli.commands import drain as draining  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"nats": nats, "cluster": cluster, "state_dir": state_dir}
    if cancel:
        leave(
            lambda console: draining.cancel(resolve_look(config, flags), node, console)
        )
    leave(
        lambda console: draining.drain(
            resolve_look(config, flags), node, force=force, wait=wait, console=console
        )
    )


def _change(
    deed: str,
    meant: tuple[tuple[str, ...], str | None, str | None, str | None],
    config: str | None,
    flags: dict[str, str | None],
    *,
    json: bool,
    hard: bool = False,
    seconds: float = 0.0,
    yes: bool = True,
) -> None:
    from kvtide.cli.commands.blocks_change import (  # noqa: PLC0415
        Deed,
        Meant,
        change,
    )
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    leave(
        lambda console: change(
            resolve_look(config, flags),
            Deed(deed),
            Meant(*meant),
            hard=hard,
            seconds=seconds,
            confirm=None if yes else _ask,
            as_json=json,
            console=console,
        )
    )


def _ask(question: str) -> bool:
    """Nobody at a terminal means no."""
    if not sys.stdin.isatty():
        typer.echo(f"{question} Not without --yes: there is nobody to ask.", err=True)
        return False
    return typer.confirm(question, err=True)
