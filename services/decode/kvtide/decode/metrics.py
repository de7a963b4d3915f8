"""What a decode worker counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtide.bus.messages import DecodeFailed, DecodeLoad, Tokens
from kvtide.kv import Role
from kvtide.runtime.metrics import LATENCY_BUCKETS_S
from kvtide.worker.metrics import WorkerMetrics


class DecodeMetrics(WorkerMetrics):
    """``kvtide_decode_…`` of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register; once a registry."""
        super().__init__(registry, Role.DECODE)
        self._ended = Counter(
            "kvtide_decode_ended",
            "Requests by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "kvtide_decode_tokens", "Tokens generated", registry=registry
        )
        self._reads = Counter(
            "kvtide_decode_reads",
            "Blocks and hand-over parts by whether they could be read",
            ["kind", "outcome"],
            registry=registry,
        )
        self._put = Counter(
            "kvtide_decode_blocks_put",
            "Generated blocks offered to the pool",
            ["outcome"],
            registry=registry,
        )
        self._before_first = Histogram(
            "kvtide_decode_before_first_token_seconds",
            "Where the time before the first token went",
            ["part"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._load = Gauge(
            "kvtide_decode_load", "Load as reported", ["what"], registry=registry
        )

    def said(self, message: Tokens | DecodeFailed) -> None:
        """Something was told to a gateway."""
        if isinstance(message, DecodeFailed):
            self._ended.labels(message.code).inc()
            return
        self._tokens.inc(len(message.ids))
        if message.finish is not None:
            self._ended.labels(message.finish).inc()
        if message.times is not None:
            times = message.times
            self._before_first.labels("wait").observe(times.wait_ms / 1000)
            self._before_first.labels("pull").observe(times.pull_ms / 1000)
            self._before_first.labels("step").observe(times.first_step_ms / 1000)

    def read(self, kind: str, *, read: int, missed: int) -> None:
        """A read has ended."""
        self._reads.labels(kind, "read").inc(read)
        self._reads.labels(kind, "missed").inc(missed)

    def put(self, outcome: str) -> None:
        """A block was offered to the pool."""
        self._put.labels(outcome).inc()

    def load(self, load: DecodeLoad) -> None:
        """The load as it is reported."""
        self._load.labels("waiting").set(load.waiting)
        self._load.labels("running").set(load.running)
        self._load.labels("kv_tokens_used").set(load.kv_tokens_used)
        self._load.labels("kv_tokens_capacity").set(load.kv_tokens_capacity)
        self._load.labels("preempted").set(load.preempted)
        self._load.labels("busy_share").set(load.busy_share)
