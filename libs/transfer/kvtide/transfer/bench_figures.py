"""What a bench measures, and the figures that come out; see ``bench``."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Step = Callable[[], int]
"""Moves some bytes; how many."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: ``limit`` is what it is compared with, ``ratio`` to that limit.

    For ``unit`` "GB/s" more is better, for "us" (a round trip) less is.
    """

    name: str
    transport: str
    operation: str
    nbytes: int
    value: float
    unit: str
    limit: str = ""
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to measure."""

    name: str
    transport: str
    operation: str
    nbytes: int
    step: Step
    unit: str = "GB/s"
    limit: str = ""


def measure(
    candidates: Sequence[Candidate], *, rounds: int, seconds: float
) -> list[Figure]:
    """Run all candidates in turn, ``rounds`` times, each for ``seconds``."""
    samples: list[list[float]] = [[] for _ in candidates]
    for candidate in candidates:
        candidate.step()
    for _ in range(rounds):
        for found, candidate in zip(samples, candidates, strict=True):
            found.append(_sample(candidate, seconds))
    medians = [statistics.median(found) for found in samples]
    by_name = dict(zip((each.name for each in candidates), medians, strict=True))
    return [
        Figure(
            each.name,
            each.transport,
            each.operation,
            each.nbytes,
            value,
            each.unit,
            each.limit,
            value / by_name[each.limit] if each.limit in by_name else None,
        )
        for each, value in zip(candidates, medians, strict=True)
    ]


def _sample(candidate: Candidate, seconds: float) -> float:
    moved = steps = 0
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        moved += candidate.step()
        steps += 1
    return spent / steps * 1e6 if candidate.unit == "us" else moved / spent / 1e9


def table(figures: Sequence[Figure]) -> str:
    """For a terminal or a README: one line for each figure."""
    lines = ["| what | value | of its limit |", "|---|---|---|"]
    for each in figures:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f} of {each.limit}"
        lines.append(f"| {each.name} | {each.value:.2f} {each.unit} | {ratio} |")
    return "\n".join(lines)


def size_text(size: int) -> str:
    """A size as a person writes it: 64 KiB, 1 MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
