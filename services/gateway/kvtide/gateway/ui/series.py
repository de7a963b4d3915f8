"""Figures over time: one point a step, the newest kept. Pure."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

import msgspec

from kvtide.bus.messages import Outcome, RequestEnded

KEPT_POINTS = 900
_MS_KEPT = 512


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What ended within one step. Times are medians in ms, None if nothing ended.

    ``late`` finished but missed its own targets; ``good`` met them, or had none.
    """

    at_s: float
    finished: int
    failed: int
    rejected: int
    cancelled: int
    good: int
    late: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    open_requests: int
    ttft_ms: float | None
    tbt_ms: float | None
    ttft_error: float | None


@dataclass(slots=True)
class _Step:
    outcomes: dict[Outcome, int] = field(default_factory=dict[Outcome, int])
    good: int = 0
    late: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    ttft_ms: list[float] = field(default_factory=list[float])
    tbt_ms: list[float] = field(default_factory=list[float])
    errors: list[float] = field(default_factory=list[float])


class Series:
    """The points of the last ``kept`` steps."""

    def __init__(self, *, kept: int = KEPT_POINTS) -> None:
        """No point yet."""
        self._points: deque[Point] = deque(maxlen=kept)
        self._step = _Step()

    def ended(
        self,
        record: RequestEnded,
        *,
        predicted_ttft_ms: float | None,
        ttft_target_ms: float | None,
        tbt_target_ms: float | None,
    ) -> None:
        """A request has its terminal answer."""
        step = self._step
        step.outcomes[record.outcome] = step.outcomes.get(record.outcome, 0) + 1
        step.prompt += record.prompt_tokens
        step.cached += record.cached_tokens
        step.output += record.output_tokens
        if record.outcome is Outcome.FINISHED:
            missed = _over(record.ttft_ms, ttft_target_ms) or _over(
                record.tbt_ms, tbt_target_ms
            )
            step.late += missed
            step.good += not missed
        if record.ttft_ms and len(step.ttft_ms) < _MS_KEPT:
            step.ttft_ms.append(record.ttft_ms)
            if predicted_ttft_ms:
                step.errors.append(abs(predicted_ttft_ms / record.ttft_ms - 1))
        if record.tbt_ms and len(step.tbt_ms) < _MS_KEPT:
            step.tbt_ms.append(record.tbt_ms)

    def close_step(self, wall_s: float, open_requests: int) -> Point:
        """End the step; its point is kept and returned."""
        step, self._step = self._step, _Step()
        point = Point(
            at_s=round(wall_s, 1),
            finished=step.outcomes.get(Outcome.FINISHED, 0),
            failed=step.outcomes.get(Outcome.FAILED, 0),
            rejected=step.outcomes.get(Outcome.REJECTED, 0),
            cancelled=step.outcomes.get(Outcome.CANCELLED, 0),
            good=step.good,
            late=step.late,
            prompt_tokens=step.prompt,
            cached_tokens=step.cached,
            output_tokens=step.output,
            open_requests=open_requests,
            ttft_ms=_median(step.ttft_ms),
            tbt_ms=_median(step.tbt_ms),
            ttft_error=_median(step.errors),
        )
        self._points.append(point)
        return point

    def since(self, at_s: float) -> list[Point]:
        """The points after ``at_s``, in order."""
        return [point for point in self._points if point.at_s > at_s]


def _over(value_ms: float | None, target_ms: float | None) -> bool:
    return target_ms is not None and value_ms is not None and value_ms > target_ms


def _median(values: list[float]) -> float | None:
    return round(median(values), 3) if values else None
