"""Predicted against actual times, always."""

from collections import deque
from statistics import median

from prometheus_client import CollectorRegistry, Gauge, Histogram

_S_BUCKETS = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip
_ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_MS_TO_S = 0.001
_WINDOW = 101


class PredictionMetrics:
    """``kvtide_conductor_NAME_…``: both times, the error, and its recent median."""

    def __init__(self, name: str, what: str, registry: CollectorRegistry) -> None:
        """``name`` is ``ttft`` or ``tbt``; once a registry."""
        self._predicted, self._actual = (
            Histogram(
                f"kvtide_conductor_{name}_{which}_seconds",
                f"The {which} {what} of requests that were placed here and ended",
                buckets=_S_BUCKETS,
                registry=registry,
            )
            for which in ("predicted", "actual")
        )
        self._error = Histogram(
            f"kvtide_conductor_{name}_error_ratio",
            f"Predicted against actual {what}: |predicted / actual - 1|",
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )
        self._median = Gauge(
            f"kvtide_conductor_{name}_error_median_ratio",
            f"The median error of the last {_WINDOW} predictions of the {what}",
            registry=registry,
        )
        self._errors: deque[float] = deque(maxlen=_WINDOW)

    def observed(self, predicted_ms: float, actual_ms: float) -> None:
        """One request; ``actual_ms`` is above zero."""
        error = abs(predicted_ms / actual_ms - 1)
        self._predicted.observe(predicted_ms * _MS_TO_S)
        self._actual.observe(actual_ms * _MS_TO_S)
        self._error.observe(error)
        self._errors.append(error)
        self._median.set(median(self._errors))
