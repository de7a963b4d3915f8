"""``kvtide sim reproduce``: the paper's figures beside ours."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvtide.runtime import ConfigError
from kvtide.sim.perf.reproduction.bench import Bench
from kvtide.sim.perf.reproduction.report import SECTIONS, assemble, make_section


def make_report(
    examples: Path, out: Path, kept: Path, only: Sequence[str], console: Console
) -> None:
    """Make the sections that are missing; without ``only``, the report too.

    Raises:
        ConfigError: no such section.
        TraceError: a trace can't be read.
    """
    unknown = [name for name in only if name not in SECTIONS]
    if unknown:
        message = f"--only {unknown[0]!r}: one of {', '.join(SECTIONS)}"
        raise ConfigError(message, key="only")
    bench = Bench(examples)
    for name in only or SECTIONS:
        console.print(f"{name} …")
        make_section(bench, name, kept)
    if not only:
        out.write_text(assemble(bench, kept), encoding="utf-8")
        console.print(f"written: {out}")
