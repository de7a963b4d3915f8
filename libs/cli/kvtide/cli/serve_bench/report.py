"""What is shown and kept of a load: a table, Markdown, JSON and a plot."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from kvtide.cli.serve_bench.counters import Counts
from kvtide.cli.serve_bench.figures import Spread, Summary, Timing, timing
from kvtide.cli.serve_bench.outcomes import Exchange, Outcome
from kvtide.cli.serve_bench.plot import plot

_FEW = 100


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request, for the file."""

    conversation: int
    turn: int
    outcome: str
    due_s: float | None = None
    sent_s: float | None = None
    ended_s: float | None = None
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    detail: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``serve.json``: what was asked, of whom, what came of it."""

    url: str
    model: str
    kvtide: str
    load: dict[str, str]
    cut_turns: int
    summary: Summary
    counters: Counts
    requests: tuple[Row, ...]


def rows(exchanges: Sequence[Exchange]) -> tuple[Row, ...]:
    """In the order of the load."""
    return tuple(_row(each, timing(each)) for each in exchanges)


def _row(each: Exchange, found: Timing | None) -> Row:
    usage = each.usage
    return Row(
        conversation=each.conversation,
        turn=each.turn,
        outcome=each.outcome.value,
        due_s=_rounded(each.due_s),
        sent_s=_rounded(each.sent_s),
        ended_s=_rounded(each.ended_s),
        ttft_ms=_rounded(found.ttft_ms) if found else None,
        tbt_ms=_rounded(found.tbt_ms) if found else None,
        tpot_ms=_rounded(found.tpot_ms) if found else None,
        e2e_ms=_rounded(found.e2e_ms) if found else None,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        detail=each.detail,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def write(report: Report, exchanges: Sequence[Exchange], folder: Path) -> None:
    """``serve.json``, ``serve.md`` and ``serve.svg``; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    body = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / "serve.json").write_bytes(body + b"\n")
    (folder / "serve.md").write_text(markdown(report))
    timings = [found for each in exchanges if (found := timing(each)) is not None]
    title = f"{report.model} at {report.url}: share of answers within a time"
    (folder / "serve.svg").write_text(
        plot(timings, report.summary.targets, title) + "\n"
    )


def markdown(report: Report) -> str:
    """The tables for a file, and the load that made them."""
    head = ("ms", "mean", "p50", "p90", "p99", "most")
    times = [head, ("---",) * len(head), *_times(report.summary)]
    facts = [("what", "value"), ("---", "---"), *_facts(report)]
    load = ", ".join(f"{name} {value}" for name, value in report.load.items())
    blocks = [_lines(times), _lines(facts), f"{report.model} at {report.url}; {load}."]
    return "\n\n".join(blocks) + "\n"


def _lines(cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def tables(report: Report) -> tuple[Table, Table]:
    """Times, and all else, for a terminal."""
    times = Table(box=None)
    times.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "most"):
        times.add_column(name, justify="right")
    for row in _times(report.summary):
        times.add_row(*row)
    facts = Table(box=None, show_header=False)
    facts.add_column()
    facts.add_column(justify="right")
    for row in _facts(report):
        facts.add_row(*row)
    return times, facts


def _times(found: Summary) -> list[tuple[str, ...]]:
    named = (
        ("time to first token", found.ttft_ms),
        ("time between tokens (longest tenth)", found.tbt_ms),
        ("time per output token", found.tpot_ms),
        ("whole answer", found.e2e_ms),
        ("sent late", found.late_ms),
    )
    return [(name, *_cells(each)) for name, each in named]


def _cells(each: Spread) -> tuple[str, ...]:
    values = (each.mean, each.p50, each.p90, each.p99, each.most)
    return tuple(f"{v:,.0f}" if v >= _FEW else f"{v:.1f}" for v in values)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    found = report.summary
    yield "requests", f"{found.requests}"
    for name in Outcome:
        if count := found.outcomes.get(name.value, 0):
            yield f"  {name.value.replace('_', ' ')}", f"{count}"
    yield "lasted", f"{found.span_s:.1f} s"
    yield "answers", f"{found.requests_per_s:.2f}/s"
    yield (
        "prompt tokens",
        f"{found.prompt_tokens:,} ({found.prompt_tokens_per_s:.1f}/s)",
    )
    yield (
        "output tokens",
        f"{found.output_tokens:,} ({found.output_tokens_per_s:.1f}/s)",
    )
    yield (
        f"goodput ({_targets(found)})",
        f"{found.goodput:.1%}, {found.good_per_s:.2f}/s",
    )
    if found.hit_share is None:
        yield "prompt tokens from a cache", "the server does not say"
    else:
        share = f"{found.cached_tokens:,} ({found.hit_share:.1%})"
        yield "prompt tokens from a cache", share
        yield "requests with a hit", f"{found.hit_requests}"
    if found.short_answers:
        yield "answers shorter than asked", f"{found.short_answers}"
    if report.cut_turns:
        yield "turns cut for the context", f"{report.cut_turns}"
    for name, value in report.counters.items():
        yield name, f"{value:,.0f}"


def _targets(found: Summary) -> str:
    named = (("TTFT", found.targets.ttft_ms), ("TBT", found.targets.tbt_ms))
    words = [f"{name} at most {ms:g} ms" for name, ms in named if ms is not None]
    return ", ".join(words) or "no targets"
