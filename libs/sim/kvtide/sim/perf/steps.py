"""The steps of one engine's batch, those between two changes of it at once. Exact.

From step to step a batch of n requests has n tokens of KV more, so the times of the
steps until somebody comes or goes are an arithmetic sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.policy import StepCurve

Floats = NDArray[np.float64]
_MOST_STEPS = 4096


@dataclass(slots=True, eq=False)
class Row:
    """A request in a batch: the steps after which its first and last token are there."""

    number: int
    kv_tokens: int
    output_tokens: int
    ended: Callable[[float], None]
    first_step: int = 0
    last_step: int = 0


class StepLog:
    """The latest steps' times in ms. Bounded: only those of requests that still run."""

    def __init__(self) -> None:
        """No step yet."""
        self._ms = np.zeros(1024)
        self._base = 0
        self.steps = 0

    def add(self, times_ms: Floats, oldest: int) -> None:
        """Steps have ended; nobody will ask for those before ``oldest``."""
        size = len(times_ms)
        used = self.steps - self._base
        if used + size > len(self._ms):
            kept = self._ms[max(0, oldest - self._base) : used].copy()
            self._base = self.steps - len(kept)
            room = max(1024, 2 * (len(kept) + size))
            self._ms = np.zeros(room)
            self._ms[: len(kept)] = kept
            used = len(kept)
        self._ms[used : used + size] = times_ms
        self.steps += size

    def worst_ms(self, first: int, last: int, *, skipped_ms: float = 0.0) -> float:
        """Mean of the longest tenth of the gaps after step ``first``, up to ``last``.

        The first gap is shorter by what of it was over when the request began.
        """
        gaps = self._ms[first - self._base : last - self._base]
        if not len(gaps):
            return 0.0
        if skipped_ms:
            gaps = gaps.copy()
            gaps[0] -= skipped_ms
        count = -(-len(gaps) // 10)
        return float(np.partition(gaps, len(gaps) - count)[-count:].mean())


def run_ms(curve: StepCurve, rows: int, kv_tokens: int, steps: int) -> Floats:
    """The times of so many steps of a batch that nobody joins or leaves."""
    first = curve.ms(rows, kv_tokens)
    count = min(steps, _MOST_STEPS)
    return first + curve.pair_ms * rows * np.arange(count, dtype=np.float64)
