"""By how much first tokens come later than the parts of a placement add up to.

What no part's own cost has: tokenising, messages, slots to be granted, steps between
chunks, cores that others use too. Fitted to requests that have ended.
"""

from collections import deque
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtide.policy.fitting import FitRules, RobustFit

T = TypeVar("T", float, NDArray[np.float64])

_CONFIDENT = 10
_WINDOW = 41
_QUANTILE = 0.75
_TRUSTED_S = 30.0
"""So long what was seen of a crowd is believed, and half as much each time after."""
_SPREAD = (50.0, 0.3, 0.3)
_RULES = FitRules(forget=0.98, pull=0.1)
_LEAST_SHARE = 0.25
_MOST_SHARE = 4.0


@dataclass(frozen=True, slots=True)
class Lateness:
    """TTFT = ``fixed_ms`` + ``queue_share`` · queue + ``rest_share`` · all that follows it.

    The shares are above zero.
    """

    fixed_ms: float
    queue_share: float
    rest_share: float

    def ttft_ms(self, queue_ms: T, parts_ms: T) -> T:
        """What is to be expected where queue and all parts add up to ``parts_ms``."""
        late_ms = self.fixed_ms + self.queue_share * queue_ms
        return late_ms + self.rest_share * (parts_ms - queue_ms)

    def rest_ms(self, queue_ms: float, ttft_ms: float) -> float:
        """What was added up after the queue, of a TTFT that this made of it."""
        left_ms = ttft_ms - self.fixed_ms - self.queue_share * queue_ms
        return max(0.0, left_ms / self.rest_share)


class LatenessFit:
    """Predicted parts against what came. Bounded in memory."""

    def __init__(self) -> None:
        """Nothing has ended: parts are taken as they add up."""
        self._fit = RobustFit((0.0, 1.0, 1.0), _SPREAD, _RULES)
        self._known: Lateness | None = None

    def add(self, queue_ms: float, rest_ms: float, actual_ms: float) -> None:
        """A request for which so much was added up got its first token after that."""
        self._fit.add((1.0, max(0.0, queue_ms), max(0.0, rest_ms)), actual_ms)
        if self._fit.samples >= _CONFIDENT:
            fixed_ms, queue, rest = self._fit.theta
            self._known = Lateness(fixed_ms, _bounded(queue), _bounded(rest))

    @property
    def known(self) -> Lateness | None:
        """What is believed; None before enough was seen."""
        return self._known


class CrowdFit:
    """By how much each open request makes the first token of another one later.

    Beyond what was predicted: they share cores, gateways and a bus, of which no cost
    knows. The upper quartile of the latest, so that three of four keep a target that
    is held against it. The window is bounded; nothing where predictions hold. What
    nothing was added to for a while is believed less and less: a crowd that is let in
    no more shows no more that it would be quicker by now. Beside more than any of the
    latest had, it is thought as late as beside as many as they had: what one request
    adds to another says little of what forty would.
    """

    def __init__(self) -> None:
        """Nothing has ended: no request makes another one later."""
        self._late_ms: deque[float] = deque(maxlen=_WINDOW)
        self._others: deque[int] = deque(maxlen=_WINDOW)
        self._each_ms = 0.0
        self._added_s = 0.0

    def add(
        self, others: int, predicted_ms: float, actual_ms: float, now_s: float
    ) -> None:
        """A first token came, of a request at whose placement so many were open."""
        if others <= 0 or not np.isfinite(actual_ms - predicted_ms):
            return
        believed = self._believed(now_s)
        for place, late_ms in enumerate(self._late_ms):
            self._late_ms[place] = late_ms * believed
        self._added_s = now_s
        self._late_ms.append((actual_ms - predicted_ms) / others)
        self._others.append(others)
        if len(self._late_ms) >= _CONFIDENT:
            self._each_ms = max(0.0, float(np.quantile(self._late_ms, _QUANTILE)))

    def ms(self, others: int, now_s: float) -> float:
        """How much later than predicted a first token comes beside so many."""
        seen = min(others, max(self._others, default=0))
        return self._each_ms * seen * self._believed(now_s)

    def _believed(self, now_s: float) -> float:
        return 0.5 ** max(0.0, (now_s - self._added_s) / _TRUSTED_S - 1)


def _bounded(share: float) -> float:
    return min(max(share, _LEAST_SHARE), _MOST_SHARE)
