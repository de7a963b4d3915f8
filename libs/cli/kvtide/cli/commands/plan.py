"""``kvtide plan``: does pooling pay for this workload, on these machines?"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtide.cli.exits import leave


def plan(
    trace: Annotated[
        Path, typer.Argument(help="A trace in JSON lines (.gz or not), or a TOML.")
    ],
    cluster: Annotated[Path, typer.Argument(help="A cluster; see examples/clusters.")],
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path(
        "plan.html"
    ),
    requests: Annotated[
        int, typer.Option(min=1, help="Of the trace, the first so many.")
    ] = 2000,
    rate: Annotated[float, typer.Option(help="Arrivals, times as dense.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(help="The target.")] = 30_000.0,
    tbt_ms: Annotated[float, typer.Option(help="The target.")] = 200.0,
) -> None:
    """Say whether a KV pool and prefill apart from decode pay for a workload."""
    from kvtide.cli.commands.plan_report import Question, answer  # noqa: PLC0415

    def work(console: Console) -> None:
        asked = Question(trace, cluster, html, requests, rate, ttft_ms, tbt_ms)
        answer(asked, console)

    leave(work)
