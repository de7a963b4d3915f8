"""``kvtide explain``: why a request went where it went."""

import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.bus.messages import CandidateEstimate
from kvtide.catalog import DecisionOutcome
from kvtide.cli.explanations import Explanation, find_explanation
from kvtide.runtime.settings import RoleSettings


def show_explanation(
    settings: RoleSettings, request: str, *, as_json: bool, console: Console
) -> None:
    """Find the decision on ``request`` and print its candidates, best first.

    Raises:
        UnknownRequestError: see ``find_explanation``.
    """
    explained = asyncio.run(find_explanation(settings, request))
    if as_json:
        console.print_json(msgspec.json.encode(explained).decode())
        return
    lines = [
        f"{explained.request}, attempt {explained.attempt}: {explained.reason}",
        f"(from {explained.source})",
    ]
    if explained.outcome is not None:
        predicted = explained.candidates[0] if explained.candidates else None
        lines.append(_outcome(explained.outcome, predicted))
    for line in lines:
        console.print(line, highlight=False, markup=False)
    console.print(_table(explained))
    rest = _rest(explained)
    if rest:
        console.print(rest, highlight=False, markup=False)


def _outcome(outcome: DecisionOutcome, predicted: CandidateEstimate | None) -> str:
    text = f"{outcome.outcome}, {outcome.cached_tokens} tokens came from the pool"
    for name, actual_ms, guess_ms in (
        ("TTFT", outcome.ttft_ms, predicted and predicted.ttft_ms),
        ("TBT", outcome.tbt_ms, predicted and predicted.tbt_ms),
    ):
        if actual_ms is not None:
            text += f", {name} {actual_ms:.1f} ms"
            if guess_ms is not None:
                text += f" (predicted {guess_ms:.1f}"
                text += f", {guess_ms / actual_ms - 1:+.0%})" if actual_ms else ")"
    return text


def _rest(explained: Explanation) -> str:
    """The candidates that the table doesn't show."""
    more = explained.considered - len(explained.candidates)
    others = explained.others
    if more <= 0:
        return ""
    if others is None:
        return f"and {more} more"
    return (
        f"and {more} more: TTFT from {others.least_ttft_ms:.1f} to "
        f"{others.most_ttft_ms:.1f} ms, the median {others.median_ttft_ms:.1f} ms"
    )


def _table(explained: Explanation) -> Table:
    table = Table(box=None)
    titles = ("prefill", "decode", "hit", "queue", "transfer", "prefill", "TTFT", "TBT")
    for title in titles:
        table.add_column(title)
    for candidate in explained.candidates:
        table.add_row(
            escape(candidate.prefill),
            escape(candidate.decode),
            f"{candidate.hit_tokens} tokens",
            f"{candidate.queue_ms:.1f} ms",
            f"{candidate.transfer_ms:.1f} ms",
            f"{candidate.prefill_ms:.1f} ms",
            f"{candidate.ttft_ms:.1f} ms",
            f"{candidate.tbt_ms:.1f} ms",
        )
    return table
