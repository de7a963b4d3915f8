# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportMissingTypeArgument=false
"""What the connector did, in vLLM's log and among its metrics."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtide.connect.counts import FIELDS


class KvtideStats(KVConnectorStats):
    """Differences of ``ClientCounts``, summed over ranks and steps."""

    def reset(self) -> None:
        """Nothing was done."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was done."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together, in this one."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: round(value, 6) for name, value in self.data.items() if value}


class KvtidePromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtide_…_total`` for each of ``ClientCounts``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make the counters."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            each.name: self._counter_cls(
                name=f"vllm:kvtide_{each.name}",
                documentation=f"kvtide connector: {each.name.replace('_', ' ')}",
                labelnames=labelnames,
            )
            for each in FIELDS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name].labels(*labels).inc(value)
