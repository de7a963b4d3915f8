"""What an endpoint does, as Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvtide.transfer.handles import Operation

SECONDS_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
    0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class PrometheusObserver:
    """An ``Observer`` that counts by path, purpose and operation.

    ``kvtide_transfer_bytes_total`` has the side too: "client" for what we asked for,
    "server" for what peers did with our memory. Shared memory, files and reads by RDMA
    have no server side: the owner's processor takes no part.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics in ``registry``."""
        path = ("path", "purpose")
        operation = (*path, "operation")
        self._bytes = Counter(
            "kvtide_transfer_bytes",
            "Bytes moved by transfers that were completed.",
            (*operation, "side"),
            registry=registry,
        )
        self._operations = Counter(
            "kvtide_transfer_operations",
            "Transfers that were completed.",
            (*operation, "side"),
            registry=registry,
        )
        self._errors = Counter(
            "kvtide_transfer_errors",
            "Transfers that failed, by the kind of error.",
            (*operation, "kind"),
            registry=registry,
        )
        self._retries = Counter(
            "kvtide_transfer_retries",
            "Parts of transfers that were tried again, by the kind of error.",
            (*path, "kind"),
            registry=registry,
        )
        self._seconds = Histogram(
            "kvtide_transfer_seconds",
            "Time from the start of a transfer to its end.",
            operation,
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._refused = Counter(
            "kvtide_transfer_refused",
            "Connections to our port that were turned away; the log has the reasons.",
            registry=registry,
        )

        # by labels, which take longer to look up than a small transfer should
        self._kept: dict[tuple[str, str, Operation], tuple[Counter, Counter, Histogram]]
        self._kept = {}
        self._kept_served: dict[tuple[str, str, Operation], tuple[Counter, Counter]]
        self._kept_served = {}

    def transferred(
        self,
        path: str,
        purpose: str,
        operation: Operation,
        nbytes: int,
        seconds: float,
    ) -> None:
        """See ``Observer.transferred``."""
        key = (path, purpose, operation)
        kept = self._kept.get(key)
        if kept is None:
            labels = (path, purpose, operation.value)
            kept = self._kept[key] = (
                self._bytes.labels(*labels, "client"),
                self._operations.labels(*labels, "client"),
                self._seconds.labels(*labels),
            )
        moved, count, lasted = kept
        moved.inc(nbytes)
        count.inc()
        lasted.observe(seconds)

    def failed(self, path: str, purpose: str, operation: Operation, kind: str) -> None:
        """See ``Observer.failed``."""
        self._errors.labels(path, purpose, operation.value, kind).inc()

    def retried(self, path: str, purpose: str, reason: str) -> None:
        """See ``Observer.retried``."""
        self._retries.labels(path, purpose, reason).inc()

    def served(
        self, path: str, purpose: str, operation: Operation, nbytes: int
    ) -> None:
        """See ``Observer.served``."""
        key = (path, purpose, operation)
        kept = self._kept_served.get(key)
        if kept is None:
            labels = (path, purpose, operation.value, "server")
            kept = self._kept_served[key] = (
                self._bytes.labels(*labels),
                self._operations.labels(*labels),
            )
        moved, count = kept
        moved.inc(nbytes)
        count.inc()

    def refused(self, reason: str) -> None:
        """See ``Observer.refused``."""
        del reason
        self._refused.inc()
