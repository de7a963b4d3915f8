"""Costs that are fitted online: recursive least squares with forgetting, made robust.

The sum of squared relative errors is kept as its normal equations, in which each sample
fades with every one that follows (the information form of recursive least squares). A
weak pull to the seed stands in for what no sample tells, so nothing winds up. Samples far
off count as Huber's function has it, with the scale that the median of recent errors
gives; parameters are never negative.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_HUBER = 1.345
_MAD_TO_SIGMA = 1.4826
_LEAST_SIGMA = 0.02
_FEW = 8
_MOST = 1e6
"""A sample that is so far from the seed is no sample."""


@dataclass(frozen=True, slots=True)
class FitRules:
    """``forget`` is by how much each sample fades with the next one.

    ``pull`` is how many samples the seed is worth, for ever; ``window`` of the latest
    errors say what is usual.
    """

    forget: float = 0.98
    pull: float = 0.001
    window: int = 63


class RobustFit:
    """y ≈ θ·x with θ ≥ 0, for positive y. Bounded in memory."""

    def __init__(
        self,
        seed: Sequence[float],
        spread: Sequence[float],
        rules: FitRules | None = None,
    ) -> None:
        """θ is ``seed`` at first; ``spread`` (positive) is by how much it may be off."""
        self._rules = rules or FitRules()
        self._spread = np.array(spread, dtype=np.float64)
        self._seed = np.maximum(0.0, np.array(seed, dtype=np.float64)) / self._spread
        size = len(self._seed)
        self._a = np.zeros((size, size))
        self._b = np.zeros(size)
        self._z = self._seed.copy()
        self._errors: deque[float] = deque(maxlen=self._rules.window)
        self._stale = False
        self._theta: tuple[float, ...] | None = None
        self.samples = 0

    @property
    def theta(self) -> tuple[float, ...]:
        """The parameters now; the same object as long as nothing was added."""
        if self._theta is None:
            self._theta = tuple((self._solved() * self._spread).tolist())
        return self._theta

    @property
    def error(self) -> float | None:
        """The median of the latest relative errors, each from before its sample counted."""
        return float(np.median(self._errors)) if self._errors else None

    def add(self, x: Sequence[float], y: float) -> None:
        """Take a sample. One that is no number, or not above zero, is ignored."""
        scaled = np.array(x, dtype=np.float64) * self._spread
        if not (np.isfinite(scaled).all() and np.isfinite(y) and y > 0):
            return
        if scaled.max() > _MOST * y:
            return
        u = scaled / y
        error = abs(1.0 - float(u @ self._solved()))
        weight = 1.0
        if len(self._errors) >= _FEW:
            sigma = max(_LEAST_SIGMA, _MAD_TO_SIGMA * float(np.median(self._errors)))
            weight = min(1.0, _HUBER * sigma / max(error, 1e-12))
        self._errors.append(error)
        self._a = self._a * self._rules.forget + weight * np.outer(u, u)
        self._b = self._b * self._rules.forget + weight * u
        self._stale = True
        self._theta = None
        self.samples += 1

    def _solved(self) -> Vector:
        if self._stale:
            pull = self._rules.pull
            size = len(self._seed)
            self._z = not_negative(
                self._a + pull * np.eye(size), self._b + pull * self._seed
            )
            self._stale = False
        return self._z


def not_negative(a: Vector, b: Vector) -> Vector:
    """The z ≥ 0 for which z·a·z / 2 - b·z is smallest; ``a`` is positive definite.

    Tries all sets of parameters that are not zero, which are few for the few there are.
    """
    size = len(b)
    best, least = np.zeros(size), 0.0
    for count in range(size, 0, -1):
        for chosen in combinations(range(size), count):
            rows = list(chosen)
            try:
                part = np.linalg.solve(a[np.ix_(rows, rows)], b[rows])
            except np.linalg.LinAlgError:
                continue
            if not (part >= 0).all():
                continue
            value = -0.5 * float(b[rows] @ part)
            if value < least:
                best, least = np.zeros(size), value
                best[rows] = part
        if least < 0 and count == size:
            break  # the smallest of all, and not negative
    return best
