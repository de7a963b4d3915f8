"""What engine steps cost, fitted to those that were measured. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtide.bus.messages import Bound, StepSample
from kvtide.policy.fitting import not_negative

_NOISE_SHARE = 0.2
"""How far a measured step may be off, as a share of it."""

_FIXED_DOUBT_MS = 100.0
"""How far off the assumed fixed part may be."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes: ``new`` tokens, which attend to ``attended`` pairs in all."""

    rows: int
    new: int
    attended: float

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> "StepShape":
        """Of chunks (start, end): token ``t`` attends to all before it and itself."""
        rows, new, attended = 0, 0, 0.0
        for start, end in spans:
            count = end - start
            rows += 1
            new += count
            attended += count * (start + end + 1) / 2
        return cls(rows, new, attended)

    def with_shape(self, more: "StepShape") -> "StepShape":
        """Both in one step."""
        return StepShape(
            self.rows + more.rows, self.new + more.new, self.attended + more.attended
        )


NO_STEP: Final = StepShape(0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Running:
    """What a role has in each step now, and how long its steps may take (0: any time)."""

    shape: StepShape
    target_ms: float = 0.0


class StepCost:
    """ms = fixed + per_token · new + per_pair · attended, by decayed least squares.

    The three are never negative. What is assumed before anything is measured keeps a
    little weight for ever, as a normal prior does: steps that were all alike, all of one
    token say, tell nothing of others, and must not make those look free or endless.
    """

    def __init__(
        self, fixed_ms: float, token_ms: float, *, half_life_steps: float = 32.0
    ) -> None:
        """Nothing is measured yet; these are assumed."""
        self._fade = 0.5 ** (1 / half_life_steps)
        self._fixed, self._token, self._pair = fixed_ms, token_ms, 0.0
        assumed = np.array([fixed_ms, token_ms, 0.0])
        doubts = (max(_FIXED_DOUBT_MS, fixed_ms), 5 * token_ms, token_ms / 300)
        # the normal equations: of what is assumed, and of what was measured
        self._assumed_gram = np.diag([1 / doubt**2 for doubt in doubts])
        self._assumed_moment = self._assumed_gram @ assumed
        self._gram, self._moment = np.zeros((3, 3)), np.zeros(3)
        self.last: StepSample | None = None
        self.steps = 0

    def add(self, shape: StepShape, ms: float) -> None:
        """A step of this shape took ``ms``; of no tokens or no time it is ignored."""
        if ms <= 0 or shape.new <= 0:
            return
        self.last = StepSample(shape.rows, shape.new, shape.attended, ms)
        self.steps += 1
        # relative errors count, so that long steps do not drown short ones
        x = np.array([1.0, shape.new, shape.attended]) / (ms * _NOISE_SHARE)
        self._gram = self._gram * self._fade + np.outer(x, x)
        self._moment = self._moment * self._fade + x / _NOISE_SHARE
        solved = not_negative(
            self._assumed_gram + self._gram, self._assumed_moment + self._moment
        )
        self._fixed, self._token, self._pair = map(float, solved)

    def ms(self, shape: StepShape) -> float:
        """How long a step of this shape will take."""
        return (
            self._fixed + self._token * shape.new + self._pair * shape.attended
            if shape.new
            else 0.0
        )

    def tokens_within(self, ms: float, start: int, beside: StepShape) -> int:
        """The most tokens from ``start`` on that a step may add to ``beside``."""
        left = (
            ms - self._fixed - self._token * beside.new - self._pair * beside.attended
        )
        per = self._token + self._pair * start
        if left <= 0:
            return 0
        if self._pair <= 0:
            return int(left / per) if per > 0 else 1 << 30
        # per·n + pair·n²/2 = left
        root = (per * per + 2 * self._pair * left) ** 0.5
        return int((root - per) / self._pair)

    @property
    def bound(self) -> Bound | None:
        """What bounds the last step: its tokens' work, or reading the weights for it."""
        if self.last is None:
            return None
        return Bound.MEMORY if 2 * self._fixed >= self.last.ms else Bound.COMPUTE


class Busy:
    """The share of recent time in which steps were computed."""

    def __init__(self, memory_s: float = 5.0) -> None:
        """Idle so far."""
        self._memory_s = memory_s
        self._share = 0.0
        self._last_s: float | None = None

    def add(self, ms: float, now_s: float) -> None:
        """A step of ``ms`` has ended."""
        took_s = ms / 1000
        since_s = took_s if self._last_s is None else now_s - self._last_s
        if since_s > 0:
            kept = 0.5 ** (since_s / self._memory_s)
            self._share = kept * self._share + (1 - kept) * min(1.0, took_s / since_s)
        self._last_s = now_s

    def tick(self, now_s: float) -> None:
        """Time has passed; counts only while no step does."""
        if self._last_s is not None and now_s - self._last_s > self._memory_s:
            self.add(0.0, now_s)

    @property
    def share(self) -> float:
        """0 to 1."""
        return round(self._share, 2)
