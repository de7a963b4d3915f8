"""The ``kvtide`` command: names, flags and help; the work is in ``commands``.

Nothing heavy is imported before the command is known, so that help is quick.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtide.cli.benches import bench_app
from kvtide.cli.commands.plan import plan
from kvtide.cli.commands.sim import sim_app
from kvtide.cli.exits import leave
from kvtide.cli.flags import CatalogUrl, Cluster, Config, Json, Nats, StateDir
from kvtide.cli.pool_commands import blocks_app, drain
from kvtide.cli.tenant_commands import audit, cluster_keys, keys_app, tenants_app

app = typer.Typer(
    name="kvtide",
    help="LLM serving with the KV cache at the centre.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bus_app = typer.Typer(help="Look at the bus.", no_args_is_help=True)
app.add_typer(bus_app, name="bus")
app.add_typer(bench_app, name="bench")
app.add_typer(sim_app, name="sim")
app.add_typer(blocks_app, name="blocks")
app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.command()(audit)
app.command("cluster-keys")(cluster_keys)
app.command()(drain)
app.command()(plan)

FLAGGED = {
    "up": "Start the whole system on this machine: every role, one command.",
    "gateway": "Run a gateway: the public door, OpenAI's API.",
    "conductor": "Run a conductor: places requests on workers.",
    "prefill": "Run a prefill worker: makes KV.",
    "decode": "Run a decode worker: makes tokens.",
    "store": "Run a store: keeps KV blocks, the pool on this host.",
    "router": "Route to an engine that runs already, vLLM's or SGLang's, by its URL.",
    "worker": "Run prefill and decode in one process, with one loaded model.",
}


@app.command()
def version() -> None:
    """Print the version."""
    from kvtide.runtime.metrics import version as installed  # noqa: PLC0415

    Console().print(f"kvtide {installed()}", highlight=False)


@app.command()
def config(
    role: Annotated[
        list[str] | None, typer.Argument(help="Roles, or up; all if none.")
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show each setting's value and where it came from."""
    from kvtide.cli.commands.config import show_config  # noqa: PLC0415

    path = Path(config) if config else None
    leave(lambda console: show_config(role or (), path, as_json=json, console=console))


@app.command()
def status(
    config: Config = None,
    nats: Nats = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Show nodes, their load, and the cache."""
    from kvtide.cli.commands.status import show_status  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"nats": nats, "cluster": cluster, "state_dir": state_dir}
    leave(
        lambda console: show_status(
            resolve_look(config, flags), as_json=json, console=console
        )
    )


@app.command()
def top(
    every_s: Annotated[
        float, typer.Option("--every", min=0.2, help="Seconds between two looks.")
    ] = 1.0,
    rounds: Annotated[
        int, typer.Option(min=0, help="Looks before it ends; 0: until Ctrl-C.")
    ] = 0,
    config: Config = None,
    nats: Nats = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
) -> None:
    """Watch nodes, load, cache and the newest requests, in this terminal."""
    from kvtide.cli.commands.top import top as show_top  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"nats": nats, "cluster": cluster, "state_dir": state_dir}
    leave(
        lambda console: show_top(
            resolve_look(config, flags), every_s=every_s, rounds=rounds, console=console
        )
    )


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option(help="Leave the system running at the end, until Ctrl-C.")
    ] = False,
) -> None:
    """Show in a minute, on a fresh start, what the cache is worth; checks its claims."""
    from kvtide.cli.demo import demo as play  # noqa: PLC0415

    leave(lambda console: play(keep=keep, console=console))


@app.command()
def profile(
    out: Annotated[
        str | None,
        typer.Option(help="File to write. Default: print it.", metavar="PATH"),
    ] = None,
    config: Config = None,
    nats: Nats = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
) -> None:
    """Show what workers' work was measured to cost, as a profile for conductors."""
    from kvtide.cli.commands.profile import show_profile  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"nats": nats, "cluster": cluster, "state_dir": state_dir}
    path = Path(out) if out else None
    leave(
        lambda console: show_profile(resolve_look(config, flags), path, console=console)
    )


@app.command()
def explain(
    request: Annotated[
        str,
        typer.Argument(help="A request's x-request-id, or its name in the cluster."),
    ],
    config: Config = None,
    nats: Nats = None,
    catalog: CatalogUrl = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Say why a request went where it went."""
    from kvtide.cli.commands.explain import show_explanation  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {
        "nats": nats,
        "catalog": catalog,
        "cluster": cluster,
        "state_dir": state_dir,
    }
    leave(
        lambda console: show_explanation(
            resolve_look(config, flags), request, as_json=json, console=console
        )
    )


@bus_app.command("tail")
def bus_tail(
    subject: Annotated[
        str, typer.Option(help="A NATS subject, wildcards allowed; all if empty.")
    ] = "",
    count: Annotated[int, typer.Option(help="Stop after so many.", min=0)] = 0,
    config: Config = None,
    nats: Nats = None,
    cluster: Cluster = None,
    state_dir: StateDir = None,
) -> None:
    """Print live messages, decoded with plain MessagePack."""
    from kvtide.cli.commands.bus_tail import tail  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"nats": nats, "cluster": cluster, "state_dir": state_dir}
    leave(lambda console: tail(resolve_look(config, flags), subject, count, console))


@app.command()
def health(
    url: Annotated[str, typer.Argument(help="Such as http://127.0.0.1:8000/readyz.")],
) -> None:
    """Exit 0 if the URL answers 200, else 1: for health checks."""
    from kvtide.cli.commands.health import check  # noqa: PLC0415

    leave(lambda console: check(url, console))


@app.command()
def doctor(
    config: Config = None,
    nats: Nats = None,
    catalog: CatalogUrl = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Check this machine, and say what to do about each finding."""
    from kvtide.cli.commands.doctor import examine  # noqa: PLC0415
    from kvtide.cli.resolve import resolve_look  # noqa: PLC0415

    flags = {"nats": nats, "catalog": catalog, "state_dir": state_dir}
    leave(
        lambda console: examine(
            resolve_look(config, flags), as_json=json, console=console
        )
    )


@app.command("fetch-model")
def fetch_model(
    config: Config = None,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder for the model. Default: ~/.cache/kvtide.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fetch the model, and print its folder."""
    from kvtide.cli.commands.fetch_model import fetch_model as fetch  # noqa: PLC0415

    path = Path(config) if config else None
    leave(lambda console: fetch(path, cache_dir, console))


def _no_flags() -> None:
    """Stand in for a command that was not asked for, so that help lists it."""


def _add_flagged_commands(wanted: str) -> None:
    """Commands whose flags come from settings: only the wanted one gets them."""
    for name, summary in FLAGGED.items():
        command = _no_flags
        if name == wanted:
            from kvtide.cli.flagged import flagged  # noqa: PLC0415

            command = flagged(name)
        app.command(name, help=summary)(command)


def main() -> None:
    """Run the command line."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    _add_flagged_commands(words[0] if words else "")
    app()


if __name__ == "__main__":
    main()
