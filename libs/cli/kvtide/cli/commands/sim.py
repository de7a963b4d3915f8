"""``kvtide sim …``: what the production code would do, without a cluster."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtide.cli.exits import leave

sim_app = typer.Typer(
    help="See what this code would do with a load, without a cluster.",
    no_args_is_help=True,
)


@sim_app.callback()
def sim() -> None:
    """Have a group although there may be one command."""


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
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
