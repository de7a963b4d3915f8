"""``kvtide bench``: names and flags of what can be measured."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtide.cli import serve_flags as serving_load
from kvtide.cli.exits import leave
from kvtide.cli.flags import Json

USUAL = "serving"


class UsualCommand(TyperGroup):
    """``kvtide bench URL`` means ``kvtide bench serving URL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the usual command in front of what names none."""
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [USUAL, *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    help="Measure a running kvtide (serving, also without its name), any server under "
    "load (serve), parts of kvtide, or transfers.",
    cls=UsualCommand,
)


@bench_app.command(USUAL)
def serving(
    url: Annotated[
        str, typer.Argument(help="Where kvtide answers.")
    ] = "http://127.0.0.1:8000",
    rounds: Annotated[int, typer.Option(help="Prompts to try.", min=1)] = 3,
    prompt_tokens: Annotated[
        int, typer.Option(help="About how long each is.", min=1)
    ] = 2000,
    output_tokens: Annotated[int, typer.Option(help="Tokens to make.", min=1)] = 8,
    json: Json = False,
) -> None:
    """Time the first token of a long prompt, cold and from the cache."""
    from kvtide.cli.commands.bench import bench as measure  # noqa: PLC0415

    leave(
        lambda console: measure(
            url,
            rounds=rounds,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            as_json=json,
            console=console,
        )
    )


@bench_app.command()
def transfer(
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Bytes of a transfer, such as 64KiB; may be given again. "
            "Default: 64KiB, 1MiB, 16MiB.",
            show_default=False,
        ),
    ] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(
            help="shm, tcp, file or rdma; may be given again. Default: shm and tcp.",
            show_default=False,
        ),
    ] = None,
    operation: Annotated[
        list[str] | None,
        typer.Option(
            help="read or write; may be given again. Default: both.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="A figure is their median.", min=1)] = 5,
    seconds: Annotated[
        float, typer.Option(help="Of each figure in each round.", min=0.001)
    ] = 0.4,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for table, JSON and plot.", metavar="PATH", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Move bytes between two processes, and compare with what the machine can do."""
    from kvtide.cli.commands.bench_transfer import (  # noqa: PLC0415
        bench_transfer,
        choose,
    )

    leave(
        lambda console: bench_transfer(
            choose(
                size or (),
                transport or (),
                operation or (),
                rounds=rounds,
                seconds=seconds,
            ),
            out=out,
            as_text=not json,
            console=console,
        )
    )


@bench_app.command()
def store(
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the SSD tier lies. Default: the temporary folder.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks in the index. Default: 1000000.", min=100, show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for table and JSON.", metavar="PATH", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Read, put, look up and evict blocks, and compare with what the machine can do."""
    from kvtide.cli.commands.bench_store import bench_store  # noqa: PLC0415

    leave(
        lambda console: bench_store(
            folder=folder, blocks=blocks, out=out, as_json=json, console=console
        )
    )


@bench_app.command()
def serve(
    url: serving_load.Url = "http://127.0.0.1:8000",
    concurrency: serving_load.Concurrency = None,
    rate: serving_load.Rate = None,
    trace: serving_load.Trace = None,
    speed: serving_load.Speed = 1.0,
    length_scale: serving_load.LengthScale = 1.0,
    sample: serving_load.Sample = 1.0,
    skip: serving_load.Skip = 0,
    requests: serving_load.Requests = 0,
    span_s: serving_load.Span = None,
    prompt_tokens: serving_load.PromptTokens = 512,
    output_tokens: serving_load.OutputTokens = 64,
    spread: serving_load.Variation = 0.0,
    prefixes: serving_load.Prefixes = 1,
    prefix_tokens: serving_load.PrefixTokens = 0,
    zipf: serving_load.Zipf = 1.0,
    turns: serving_load.Turns = 1,
    think_s: serving_load.Think = 0.0,
    max_tokens: serving_load.MostTokens = 8000,
    max_output_tokens: serving_load.MostOutput = 4000,
    api: serving_load.ApiName = "completions",
    model: serving_load.Model = "",
    api_key: serving_load.ApiKey = "",
    ignore_eos: serving_load.IgnoreEos = True,
    timeout_s: serving_load.Timeout = 600.0,
    max_open: serving_load.MostOpen = 1024,
    warmup: serving_load.Warmup = 1,
    ttft_ms: serving_load.Ttft = None,
    tbt_ms: serving_load.Tbt = None,
    tell_targets: serving_load.TellTargets = False,
    metrics: serving_load.Metrics = None,
    state_dir: serving_load.StateDir = None,
    seed: serving_load.Seed = 0,
    out: serving_load.Out = None,
    json: Json = False,
) -> None:
    """Send a load to any OpenAI server: TTFT, TBT, throughput, goodput, cache hits."""
    given = dict(locals())
    from kvtide.cli.commands.bench_serve import bench_serve  # noqa: PLC0415
    from kvtide.cli.serve_bench.wanted import Flags  # noqa: PLC0415

    leave(lambda console: bench_serve(Flags(**given), console))
