"""``kvtide sim hit-rates``: traces through the pool's own eviction code."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvtide.runtime import ConfigError
from kvtide.sim.hit_report import (
    HitRow,
    Trace,
    lines_of,
    markdown,
    measure,
    rate_text,
    size_text,
)
from kvtide.store.eviction import Policy

COMMAND = "kvtide sim hit-rates examples/traces/*.jsonl.gz --markdown"
MOST_TOKENS = 10**12


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which replays: each trace with each policy at each size in tokens."""

    traces: tuple[Path, ...]
    policies: tuple[Policy, ...]
    tokens: tuple[int, ...]

    @classmethod
    def parse(
        cls, traces: Sequence[Path], policies: list[str], tokens: str
    ) -> "Wanted":
        """From the command line.

        Raises:
            ConfigError: an unknown policy, or no size.
        """
        known = ", ".join(Policy)
        try:
            chosen = tuple(Policy(name) for name in policies) or tuple(Policy)
        except ValueError as error:
            raise ConfigError(f"--policy is one of {known}", key="policy") from error
        try:
            sizes = tuple(int(float(part)) for part in tokens.split(","))
        except (ValueError, OverflowError) as error:
            message = f"--tokens {tokens!r}: numbers such as 1e5,3e6"
            raise ConfigError(message, key="tokens") from error
        if any(not 0 < size <= MOST_TOKENS for size in sizes):
            message = f"--tokens {tokens!r}: each from 1 to {MOST_TOKENS:.0e}"
            raise ConfigError(message, key="tokens")
        return cls(tuple(traces), chosen, sizes)


def show_hit_rates(
    wanted: Wanted, *, as_json: bool, as_markdown: bool, console: Console
) -> None:
    """Replay and print; the published rates stand beside those of the known traces.

    Raises:
        TraceError: a trace can't be read.
    """
    traces = [Trace.read(path) for path in wanted.traces]
    if as_markdown:
        sys.stdout.write(markdown(traces, COMMAND))
        return
    rows = [
        row
        for trace in traces
        for row in measure(trace, wanted.policies, wanted.tokens)
    ]
    if as_json:
        console.print_json(msgspec.json.encode(rows).decode())
        return
    for trace in traces:
        console.print(_table(rows, trace, wanted.tokens))


def _table(rows: Sequence[HitRow], trace: Trace, tokens: Sequence[int]) -> Table:
    table = Table(
        box=None,
        title=f"{trace.name}: share of all blocks that hit, by tokens in the pool",
        title_justify="left",
    )
    for title in ("policy", "order", "counted", *map(size_text, tokens)):
        table.add_column(title, justify="left")
    for line in lines_of(rows, trace.name, tokens):
        rates = map(rate_text, line.rates)
        table.add_row(line.policy, line.order, line.counted, *rates)
    return table
