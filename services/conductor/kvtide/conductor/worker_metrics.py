"""What a conductor thinks of workers: their load by role, and what their work costs."""

from collections.abc import Mapping, Sequence
from statistics import median

from prometheus_client import CollectorRegistry, Gauge

from kvtide.conductor.reducers.roles import RoleAdvice
from kvtide.policy.class_costs import FitErrors


class WorkerMetrics:
    """``kvtide_conductor_role_…`` (for autoscalers) and ``…_fit_error_ratio``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register; once a registry."""
        self._load = Gauge(
            "kvtide_conductor_role_load",
            "Load of all workers of a role; above 1 it can't keep up with its target",
            ["role"],
            registry=registry,
        )
        self._there = Gauge(
            "kvtide_conductor_role_workers",
            "Workers that take work of a role",
            ["role"],
            registry=registry,
        )
        self._wanted = Gauge(
            "kvtide_conductor_role_wanted_workers",
            "Workers of a role that the load asks for: scaling advice",
            ["role"],
            registry=registry,
        )
        self._fit = Gauge(
            "kvtide_conductor_fit_error_ratio",
            "Median relative error of fitted costs, over worker classes",
            ["cost"],
            registry=registry,
        )

    def advice(self, advice: Sequence[RoleAdvice]) -> None:
        """As of the last tick."""
        for each in advice:
            self._load.labels(each.role.value).set(each.load)
            self._there.labels(each.role.value).set(each.workers)
            self._wanted.labels(each.role.value).set(each.wanted)

    def fits(self, errors: Mapping[str, FitErrors]) -> None:
        """As of now."""
        parts = {
            "prefill": [each.prefill for each in errors.values()],
            "loading": [each.loading for each in errors.values()],
            "step": [each.step for each in errors.values()],
        }
        for name, values in parts.items():
            known = [value for value in values if value is not None]
            if known:
                self._fit.labels(name).set(median(known))
