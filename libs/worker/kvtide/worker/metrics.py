"""What every worker counts."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvtide.kv import Role
from kvtide.runtime.metrics import LATENCY_BUCKETS_S


class WorkerMetrics:
    """``kvtide_<role>_…`` of one process."""

    def __init__(self, registry: CollectorRegistry, role: Role) -> None:
        """Register; once a registry and role."""
        self._failures = Counter(
            f"kvtide_{role}_operation_failures",
            "Operations that ended in an error nobody foresaw",
            ["operation"],
            registry=registry,
        )
        self._step = Histogram(
            f"kvtide_{role}_step_seconds",
            "Duration of an engine step",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    def operation_failed(self, operation: str) -> None:
        """An operation has raised what nobody foresaw."""
        self._failures.labels(operation).inc()

    def stepped(self, seconds: float) -> None:
        """A step has ended."""
        self._step.observe(seconds)
