"""Makes a plan and shows it: in the terminal, and as a page."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from kvtide.runtime import ConfigError
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.shapes import read_cluster
from kvtide.sim.perf.workload import read_workload
from kvtide.sim.plan.facts import facts
from kvtide.sim.plan.page import page
from kvtide.sim.plan.study import study
from kvtide.sim.plan.verdict import judge


@dataclass(frozen=True, slots=True)
class Question:
    """What the operator asks."""

    trace: Path
    cluster: Path
    html: Path
    requests: int
    rate: float
    ttft_ms: float
    tbt_ms: float


def answer(asked: Question, console: Console) -> None:
    """Run the study; print the verdict, and write the page.

    Raises:
        ConfigError: a cluster or workload that is none, or an empty one.
        TraceError: a trace can't be read.
    """
    shape = read_cluster(asked.cluster)
    size = shape.text.model.block_tokens
    coming = read_workload(asked.trace, size, rate=asked.rate)
    requests = list(islice(coming, asked.requests))
    if not requests:
        raise ConfigError(f"{asked.trace} has no requests", key="trace")
    rules = Rules(ttft_ms=asked.ttft_ms, tbt_ms=asked.tbt_ms)
    with console.status("") as status:
        found = study(requests, shape, rules, status.update)
    verdict = judge(found)
    console.print(verdict.advice, style="bold", highlight=False)
    for reason in verdict.reasons:
        console.print(f"- {reason}", highlight=False, markup=False)
    for line in facts(found):
        console.print(f"  {line}", highlight=False, markup=False)
    title = f"kvtide plan: {asked.trace.name} on {asked.cluster.name}"
    asked.html.write_text(page(title, found, verdict), encoding="utf-8")
    console.print(f"written: {asked.html}", highlight=False)
