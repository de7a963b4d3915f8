"""``kvtide sim …``: what the production code would do, without a cluster."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtide.cli.exits import leave
from kvtide.cli.flags import Json

sim_app = typer.Typer(
    help="See what this code would do with a load, without a cluster.",
    no_args_is_help=True,
)


@sim_app.command("hit-rates")
def hit_rates(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Traces in JSON lines, perhaps compressed (.gz)."),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="lru, s3fifo, lfu or length-aware; all if none."),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Sizes of the pool in tokens, with commas between.")
    ] = "1e5,1e6,3e6,1e7,5e7",
    json: Json = False,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print docs/hit-rates.md: all policies and sizes."
        ),
    ] = False,
) -> None:
    """Replay traces through the pool's own eviction code."""
    from kvtide.cli.commands.hit_rates import Wanted, show_hit_rates  # noqa: PLC0415

    def work(console: Console) -> None:
        wanted = Wanted.parse(traces, policy or [], tokens)
        show_hit_rates(wanted, as_json=json, as_markdown=markdown, console=console)

    leave(work)


@sim_app.command("run")
def run(
    cluster: Annotated[Path, typer.Argument(help="A cluster; see examples/clusters.")],
    workload: Annotated[
        Path,
        typer.Argument(help="A trace in JSON lines (.gz or not), or a TOML for one."),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="random, round_robin, least_loaded, local_cache_aware, algorithm1, "
            "best, or a baseline: coupled-plain, coupled-cached, coupled-chunked."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of synthetic workloads.")] = 0,
    rate: Annotated[float, typer.Option(help="Arrivals, times as dense.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(help="The target.")] = 30_000.0,
    tbt_ms: Annotated[float, typer.Option(help="The target.")] = 200.0,
    reject: Annotated[
        bool, typer.Option("--reject", help="Refuse what would miss a target.")
    ] = False,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of the load, the first so many.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures here.")] = None,
) -> None:
    """Serve a load with the production conductor and eviction, in virtual time."""
    from kvtide.cli.commands.sim_run import (  # noqa: PLC0415
        RunWanted,
        run_simulation,
    )
    from kvtide.sim.perf.rules import Rules  # noqa: PLC0415

    def work(console: Console) -> None:
        rules = Rules(ttft_ms=ttft_ms, tbt_ms=tbt_ms, reject=reject)
        systems = tuple(policy or ("best",))
        run_simulation(
            RunWanted(cluster, workload, systems, rules, seed, rate, json, requests),
            console,
        )

    leave(work)


@sim_app.command("reproduce")
def reproduce(
    examples: Annotated[Path, typer.Option(help="The repository's examples.")] = Path(
        "examples"
    ),
    out: Annotated[Path, typer.Option(help="The report.")] = Path(
        "docs/reproduction.md"
    ),
    kept: Annotated[
        Path,
        typer.Option(
            help="Runs that are here are not made again: remove it when code changed."
        ),
    ] = Path("build/reproduction"),
    only: Annotated[
        list[str] | None,
        typer.Option(help="Print these sections, and write no report."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave these sections out.")
    ] = None,
) -> None:
    """Make docs/reproduction.md: the paper's figures beside ours.

    Takes ten minutes of a core. Stopped, it goes on with the same command.
    """
    from kvtide.cli.commands.sim_reproduce import make_report  # noqa: PLC0415

    def work(console: Console) -> None:
        make_report(
            examples, out, kept, console, only=only or (), without=without or ()
        )

    leave(work)
