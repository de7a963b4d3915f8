# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUntypedBaseClass=false
"""What the connector in vLLM did, among the worker's metrics."""

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvtide.connect.connector_metrics import ConnectorMetrics


class ConnectorLogger(StatLoggerBase):
    """Takes the connector's counts out of what vLLM tells of its steps; no more."""

    def __init__(self, metrics: ConnectorMetrics) -> None:
        """``metrics`` are the worker's, from any number of vLLM's engines."""
        self._metrics = metrics

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """See the base class."""
        del iteration_stats, mm_cache_stats, engine_idx
        counts = getattr(scheduler_stats, "kv_connector_stats", None)
        if counts:
            self._metrics.add(counts)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def loggers(metrics: ConnectorMetrics) -> list[Callable[[Any, int], ConnectorLogger]]:
    """What vLLM makes its loggers with: one for each engine."""
    return [lambda _config, _index=0: ConnectorLogger(metrics)]
