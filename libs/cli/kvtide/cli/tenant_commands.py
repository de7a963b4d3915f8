"""``kvtide tenants``, ``kvtide keys`` and ``kvtide audit``: names and flags."""

import sys
from typing import Annotated

import typer

from kvtide.cli.exits import leave
from kvtide.cli.flags import CatalogUrl, Cluster, Config, Json, Nats, StateDir

tenants_app = typer.Typer(
    help="Add tenants, set what they may use, and end them.", no_args_is_help=True
)
keys_app = typer.Typer(
    help="Make API keys, list and revoke them.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="The tenant's name.")]
Share = Annotated[
    str | None,
    typer.Option(
        help="Cache to share with the tenants that name the same; '' for its own.",
        show_default=False,
    ),
]
Requests = Annotated[
    int | None, typer.Option(help="Requests a minute. Default: no limit.", min=1)
]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens a minute. Default: no limit.", min=1)
]
AtOnce = Annotated[
    int | None, typer.Option(help="Requests at once. Default: no limit.", min=1)
]


@tenants_app.command("add")
def add_tenant(
    name: Name,
    title: Annotated[str, typer.Option(help="A name for people.")] = "",
    share: Share = None,
    requests_per_min: Requests = None,
    tokens_per_min: Tokens = None,
    concurrent_requests: AtOnce = None,
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Add a tenant."""
    from kvtide.catalog import Limits  # noqa: PLC0415
    from kvtide.cli.commands.tenants import add  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    limits = Limits(requests_per_min, tokens_per_min, concurrent_requests)
    flags = {"catalog": catalog, "state_dir": state_dir}
    leave(
        lambda console: add(
            resolve_look(config, flags), name, title, share or "", limits, console
        )
    )


@tenants_app.command("set")
def set_tenant(
    name: Name,
    share: Share = None,
    requests_per_min: Requests = None,
    tokens_per_min: Tokens = None,
    concurrent_requests: AtOnce = None,
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Replace what a tenant may use: what is not named has no limit then."""
    from kvtide.catalog import Limits  # noqa: PLC0415
    from kvtide.cli.commands.tenants import change  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    limits = Limits(requests_per_min, tokens_per_min, concurrent_requests)
    flags = {"catalog": catalog, "state_dir": state_dir}
    leave(
        lambda console: change(
            resolve_look(config, flags), name, share, limits, console
        )
    )


@tenants_app.command("list")
def list_tenants(
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List tenants and what they may use."""
    from kvtide.cli.commands.tenants import show_tenants  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"catalog": catalog, "state_dir": state_dir}
    leave(
        lambda console: show_tenants(
            resolve_look(config, flags), as_json=json, console=console
        )
    )


@tenants_app.command("delete")
def delete_tenant(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: Config = None,
    nats: Nats = None,
    catalog: CatalogUrl = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
) -> None:
    """End a tenant: its keys are revoked, its cached blocks removed. Asks first."""
    from kvtide.cli.commands.tenants import delete  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {
        "nats": nats,
        "catalog": catalog,
        "cluster": cluster,
        "state_dir": state_dir,
    }
    if not yes and not _ask(f"Delete tenant {name}, its keys and its cached blocks?"):
        raise typer.Exit(1)
    leave(lambda console: delete(resolve_look(config, flags), name, console))


@keys_app.command("make")
def make_key(
    tenant: Annotated[str, typer.Argument(help="Whose it is; not with --admin.")] = "",
    label: Annotated[str, typer.Option(help="What it is for, for people.")] = "",
    days: Annotated[
        float | None, typer.Option(help="It expires then. Default: never.", min=0)
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="For /admin/ routes, and nothing else.")
    ] = False,
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Make a key. It is shown once: only its hash is kept."""
    from kvtide.cli.commands.keys import NewKeyWish, make  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"catalog": catalog, "state_dir": state_dir}
    wish = NewKeyWish(tenant=tenant, label=label, days=days, admin=admin)
    leave(
        lambda console: make(
            resolve_look(config, flags), wish, as_json=json, console=console
        )
    )


@keys_app.command("list")
def list_keys(
    tenant: Annotated[
        str | None, typer.Option(help="Its keys only.", show_default=False)
    ] = None,
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List keys by their public beginning."""
    from kvtide.cli.commands.keys import show_keys  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"catalog": catalog, "state_dir": state_dir}
    leave(
        lambda console: show_keys(
            resolve_look(config, flags), tenant, as_json=json, console=console
        )
    )


@keys_app.command("revoke")
def revoke_key(
    prefix: Annotated[str, typer.Argument(help="Its beginning, as the list shows it.")],
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Revoke a key: within seconds no gateway takes it."""
    from kvtide.cli.commands.keys import revoke  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"catalog": catalog, "state_dir": state_dir}
    leave(lambda console: revoke(resolve_look(config, flags), prefix, console))


def audit(
    limit: Annotated[int, typer.Option(help="At most.", min=1, max=10_000)] = 50,
    hours: Annotated[
        float | None, typer.Option(help="How far back. Default: all.", min=0)
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(help="Such as key.make or key.use.", show_default=False),
    ] = None,
    config: Config = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Show what was done to tenants and keys, and keys that failed, newest first."""
    from kvtide.cli.commands.audit import AuditWish, show_audit  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"catalog": catalog, "state_dir": state_dir}
    wish = AuditWish(limit=limit, hours=hours, action=action)
    leave(
        lambda console: show_audit(
            resolve_look(config, flags), wish, as_json=json, console=console
        )
    )


def cluster_keys(
    folder: Annotated[
        str, typer.Argument(help="Folder to make them in.", metavar="DIR")
    ],
    host: Annotated[
        list[str],
        typer.Option(help="HOST=ROLE:NODE,ROLE:NODE; once for each host."),
    ],
    nats: Annotated[
        list[str], typer.Option(help="Name or address of a NATS server; of each.")
    ],
    cluster: Annotated[str, typer.Option(help="Name of the cluster.")] = "local",
    at: Annotated[
        str, typer.Option(help="Where a host will have its folder.", metavar="PATH")
    ] = "/etc/kvtide",
) -> None:
    """Make keys and certificates for a cluster: a folder for each host."""
    from pathlib import Path  # noqa: PLC0415

    from kvtide.cli.commands.cluster_keys import write_cluster_keys  # noqa: PLC0415

    leave(
        lambda console: write_cluster_keys(
            Path(folder),
            cluster=cluster,
            nats=nats,
            hosts=host,
            at=Path(at),
            console=console,
        )
    )


def _ask(question: str) -> bool:
    """Nobody at a terminal means no."""
    if not sys.stdin.isatty():
        typer.echo(f"{question} Not without --yes: there is nobody to ask.", err=True)
        return False
    return typer.confirm(question, err=True)
