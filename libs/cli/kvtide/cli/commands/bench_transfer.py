"""``kvtide bench transfer``: bytes between two processes, beside the machine's limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtide.cli.sizes import parse_size
from kvtide.runtime import ConfigError
from kvtide.transfer import Operation
from kvtide.transfer.bench import SIZES, TRANSPORTS, USUAL, run
from kvtide.transfer.bench_figures import Figure, table
from kvtide.transfer.bench_report import as_json, plot, this_machine

LEAST_BYTES, MOST_BYTES = 64, 16 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """What to measure: all sizes by all operations over all transports."""

    sizes: tuple[int, ...]
    transports: tuple[str, ...]
    operations: tuple[Operation, ...]
    rounds: int
    seconds: float


def choose(
    sizes: Sequence[str],
    transports: Sequence[str],
    operations: Sequence[str],
    *,
    rounds: int,
    seconds: float,
) -> Choice:
    """What was asked for; what was not named is as usual.

    Raises:
        ConfigError: no such size, transport or operation.
    """
    for name in transports:
        if name not in TRANSPORTS:
            known = ", ".join(TRANSPORTS)
            raise ConfigError(f"{name!r} is none of {known}", key="transport")
    known_operations = {each.value: each for each in Operation}
    for name in operations:
        if name not in known_operations:
            raise ConfigError(f"{name!r} is neither read nor write", key="operation")
    wanted = tuple(parse_size(text) for text in sizes) or SIZES
    for each in wanted:
        if not LEAST_BYTES <= each <= MOST_BYTES:
            message = f"{each} bytes are not from {LEAST_BYTES} to {MOST_BYTES}"
            raise ConfigError(message, key="size")
    chosen = tuple(known_operations[name] for name in operations)
    return Choice(
        wanted, tuple(transports) or USUAL, chosen or tuple(Operation), rounds, seconds
    )


def bench_transfer(
    choice: Choice, *, out: Path | None, as_text: bool, console: Console
) -> None:
    """Measure, print a table (or JSON), and keep table, JSON and plot in ``out``.

    Raises:
        TransferError: a transport is not to be had here.
    """
    figures = run(
        sizes=choice.sizes,
        transports=choice.transports,
        operations=choice.operations,
        rounds=choice.rounds,
        seconds=choice.seconds,
    )
    machine = this_machine()
    report = as_json(figures, machine)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "transfer.json").write_text(report + "\n")
        (out / "transfer.md").write_text(f"{table(figures)}\n\n{machine}\n")
        (out / "transfer.svg").write_text(plot(figures) + "\n")
    if not as_text:
        console.print_json(report)
        return
    console.print(_shown(figures))
    console.print(str(machine), highlight=False)
    if out is not None:
        console.print(f"kept in {out}: transfer.json, transfer.md, transfer.svg")


def _shown(figures: Sequence[Figure]) -> Table:
    shown = Table(box=None)
    shown.add_column("what")
    shown.add_column("value", justify="right")
    shown.add_column("of its limit", justify="right")
    shown.add_column("limit")
    for each in figures:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        value = f"{each.value:.2f} {each.unit}"
        shown.add_row(each.name, value, ratio, each.limit if ratio else "")
    shown.caption = "bytes are hashed at both ends; xN: N in flight; us: less is better"
    return shown
