"""``kvtide bench``: names and flags of what can be measured."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
    help="Measure a running kvtide (serving, also without its name), its parts, or "
    "transfers.",
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
