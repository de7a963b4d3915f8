"""A connector's counts as metrics of a worker's process."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from kvtide.connect.counts import FIELDS


class ConnectorMetrics:
    """``kvtide_connector_…_total`` for each of ``ClientCounts``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register; once a registry."""
        self._counters = {
            each.name: Counter(
                f"kvtide_connector_{each.name}",
                f"Of the connector in the engine: {each.name.replace('_', ' ')}",
                registry=registry,
            )
            for each in FIELDS
        }

    def add(self, counts: Mapping[str, float]) -> None:
        """Add what was done since the last time; unknown names are of no concern."""
        for name, value in counts.items():
            counter = self._counters.get(name)
            if counter is not None and value > 0:
                counter.inc(value)
