"""What a prefill worker counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtide.bus.messages import PrefillDone, PrefillFailed, PrefillLoad
from kvtide.kv import Role
from kvtide.runtime.metrics import LATENCY_BUCKETS_S
from kvtide.worker.metrics import WorkerMetrics


class PrefillMetrics(WorkerMetrics):
    """``kvtide_prefill_…`` of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register; once a registry."""
        super().__init__(registry, Role.PREFILL)
        self._ended = Counter(
            "kvtide_prefill_ended",
            "Prefills by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "kvtide_prefill_tokens",
            "Prompt tokens by where their KV came from",
            ["source"],
            registry=registry,
        )
        self._queue = Histogram(
            "kvtide_prefill_queue_seconds",
            "From arrival to begin",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._queued = Gauge(
            "kvtide_prefill_queued", "Prompts that wait", registry=registry
        )
        self._busy = Gauge(
            "kvtide_prefill_busy_share",
            "Share of recent time in which the engine computed for prefill",
            registry=registry,
        )

    def said(self, message: PrefillDone | PrefillFailed) -> None:
        """A prefill has ended."""
        if isinstance(message, PrefillFailed):
            self._ended.labels(message.code).inc()
            return
        self._ended.labels("done").inc()
        self._tokens.labels("pool").inc(message.reused_tokens)
        self._tokens.labels("computed").inc(message.computed_tokens)
        self._queue.observe(message.times.queue_ms / 1000)

    def load(self, load: PrefillLoad) -> None:
        """The load as it is reported."""
        self._queued.set(load.queued)
        self._busy.set(load.busy_share)
