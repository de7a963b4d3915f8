"""``kvtide bench store``: the pool beside the machine's own speed, from one run."""

import asyncio
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtide.cli.exits import CLEAN, FAILED
from kvtide.cli.store_bench.measures import (
    INDEX_SIZES,
    Measure,
    index_measures,
    memory_measures,
    ssd_measures,
    work_folder,
)
from kvtide.runtime.metrics import version

SHM = Path("/dev/shm")  # noqa: S108 - the system's shared memory


def bench_store(
    *,
    folder: Path | None,
    blocks: int | None,
    out: Path | None,
    as_json: bool,
    console: Console,
) -> int:
    """Measure, print, keep in ``out``; 1 if a bar is missed.

    ``folder`` is where the SSD tier lies, ``blocks`` how large the index becomes.

    Raises:
        RigError: the store did not do what the measurement needs.
    """
    sizes = INDEX_SIZES if blocks is None else (max(1, blocks // 100), blocks)
    with (
        work_folder(folder) as work,
        tempfile.TemporaryDirectory(prefix="kvtide-bench-", dir=SHM) as shm,
    ):
        found = asyncio.run(memory_measures(Path(work), Path(shm)))
        found += asyncio.run(ssd_measures(Path(work), Path(shm)))
    found += index_measures(sizes)
    report = json.dumps(
        {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "python": sys.version.split()[0],
            "kvtide": version(),
            "measures": [{**asdict(each), "met": each.met} for each in found],
        },
        indent=2,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "store.json").write_text(report + "\n")
        (out / "store.md").write_text(markdown(found))
    if as_json:
        console.print_json(report)
    else:
        console.print(_table(found))
    return FAILED if any(each.met is False for each in found) else CLEAN


def _cells(each: Measure) -> tuple[str, ...]:
    ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
    bar = ""
    if each.bar is not None:
        word = "at least" if each.bar > 0 else "at most"
        bar = f"{word} {abs(each.bar):g}: {'met' if each.met else 'MISSED'}"
    value = f"{each.value:,.0f}" if each.value >= 1000 else f"{each.value:.2f}"  # noqa: PLR2004
    return each.name, f"{value} {each.unit}", ratio, each.limit, bar


def _table(found: list[Measure]) -> Table:
    table = Table(box=None)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("to")
    table.add_column("bar")
    for each in found:
        table.add_row(*_cells(each))
    return table


def markdown(found: list[Measure]) -> str:
    """The table for a file."""
    rows = [("what", "value", "ratio", "to", "bar"), ("---",) * 5]
    rows += [_cells(each) for each in found]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
