"""``kvtide sim reproduce``: the paper's figures beside ours."""

import gc
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvtide.runtime import ConfigError
from kvtide.sim.perf.outcomes import Report
from kvtide.sim.perf.reproduction.bench import Bench
from kvtide.sim.perf.reproduction.oscillation import (
    PLOT,
    oscillation_plot,
    oscillation_runs,
)
from kvtide.sim.perf.reproduction.report import SECTIONS, assemble

_NEW_OBJECTS = 100_000


def make_report(
    examples: Path,
    out: Path,
    kept: Path,
    console: Console,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> None:
    """Make the runs that are missing; print ``only`` these sections, or write all.

    Raises:
        ConfigError: no such section.
        TraceError: a trace can't be read.
    """
    unknown = [name for name in (*only, *without) if name not in SECTIONS]
    if unknown:
        message = f"{unknown[0]!r} is none of {', '.join(SECTIONS)}"
        raise ConfigError(message, key="section")
    # simulations make little garbage in cycles, and many objects to look through for it
    gc.set_threshold(_NEW_OBJECTS)
    began_s = time.perf_counter()

    def say(report: Report) -> None:
        passed_s = time.perf_counter() - began_s
        console.print(
            f"{passed_s:5.0f} s  {report.system} {report.requests:,} requests"
        )

    bench = Bench(examples, kept, say)
    if only:
        for name in only:
            console.print(SECTIONS[name](bench), markup=False, highlight=False)
        return
    text = assemble(bench, without)
    out.write_text(text, encoding="utf-8")
    console.print(f"written: {out}")
    if "oscillation" not in without:
        plot = oscillation_plot(oscillation_runs(bench))
        out.with_name(PLOT).write_text(plot, encoding="utf-8")
        console.print(f"written: {out.with_name(PLOT)}")
