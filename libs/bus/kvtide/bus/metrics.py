"""What a bus counts."""

from prometheus_client import CollectorRegistry, Counter


class BusMetrics:
    """The counters of one process's bus, in the registry it was given."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register; without a registry, count in a private one."""
        registry = registry if registry is not None else CollectorRegistry()
        self.registry = registry
        self.sent = Counter(
            "kvtide_bus_sent_total", "Messages sent", ["type"], registry=registry
        )
        self.received = Counter(
            "kvtide_bus_received_total",
            "Messages given to a handler",
            ["type"],
            registry=registry,
        )
        self.dropped = Counter(
            "kvtide_bus_dropped_total",
            "Messages that arrived and were dropped",
            ["reason"],
            registry=registry,
        )
        self.failed = Counter(
            "kvtide_bus_handler_failures_total",
            "Handlers that raised",
            ["type"],
            registry=registry,
        )
        self.unanswered = Counter(
            "kvtide_bus_unanswered_total",
            "Requests that got no reply in time",
            ["type"],
            registry=registry,
        )
        self.disconnects = Counter(
            "kvtide_bus_disconnects_total", "Lost connections", registry=registry
        )
