"""``kvtide sim run``: a load on a cluster, in virtual time."""

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import msgspec
from rich.console import Console
from rich.table import Table

from kvtide.sim.perf.outcomes import Report
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.running import simulate
from kvtide.sim.perf.shapes import read_cluster
from kvtide.sim.perf.workload import read_workload


@dataclass(frozen=True, slots=True)
class RunWanted:
    """What to run, and where to write what was measured."""

    cluster: Path
    workload: Path
    systems: tuple[str, ...]
    rules: Rules
    seed: int
    rate: float
    json: Path | None
    first: int | None = None


def run_simulation(wanted: RunWanted, console: Console) -> None:
    """Simulate each system; a table, and JSON if wanted.

    Raises:
        ConfigError: a cluster, workload or policy that is none.
        TraceError: a trace can't be read.
    """
    shape = read_cluster(wanted.cluster)
    requests = read_workload(
        wanted.workload,
        shape.text.model.block_tokens,
        rate=wanted.rate,
        seed=wanted.seed,
    )
    began_s = time.perf_counter()
    reports = [
        simulate(
            shape,
            islice(requests, wanted.first) if wanted.first is not None else requests,
            system,
            wanted.rules,
            seed=wanted.seed,
        )
        for system in wanted.systems
    ]
    took_s = time.perf_counter() - began_s
    console.print(_table(reports))
    speed = sum(each.requests for each in reports) / max(took_s, 1e-9)
    peak_mb = getrusage(RUSAGE_SELF).ru_maxrss / 1024
    console.print(
        f"{speed:,.0f} requests simulated a second, {peak_mb:,.0f} MB of memory at most"
    )
    if wanted.json is not None:
        wanted.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports)))


def _table(reports: list[Report]) -> Table:
    table = Table(box=None, title="times in ms", title_justify="left")
    heads = ("system", "TTFT mean", "p50", "p99", "TBT mean", "p99", "goodput")
    more = ("hits", "of them remote", "prefill GPU s", "decode GPU s", "rejected")
    for head in (*heads, *more):
        table.add_column(head, justify="left" if head == "system" else "right")
    for each in reports:
        hits = each.hit_tokens_local + each.hit_tokens_remote
        table.add_row(
            each.system,
            *(
                f"{value:,.0f}"
                for value in (
                    each.ttft_mean_ms,
                    each.ttft_p50_ms,
                    each.ttft_p99_ms,
                    each.tbt_mean_ms,
                    each.tbt_p99_ms,
                )
            ),
            f"{each.goodput:.1%}",
            f"{each.hit_share:.1%}",
            f"{each.hit_tokens_remote / max(1, hits):.1%}",
            f"{each.prefill_gpu_s:,.0f}",
            f"{each.decode_gpu_s:,.0f}",
            f"{each.rejected_early + each.rejected_late:,}",
        )
    return table
