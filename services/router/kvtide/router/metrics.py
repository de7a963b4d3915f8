"""What an engine's agent counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class RouterMetrics:
    """In one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register them."""
        self.there = Gauge(
            "kvtide_router_engine_up", "1 while the engine answers", registry=registry
        )
        self.open = Gauge(
            "kvtide_router_requests_open",
            "requests that the engine has from here",
            registry=registry,
        )
        self.blocks = Gauge(
            "kvtide_router_blocks",
            "blocks that the index has of the engine",
            registry=registry,
        )
        self.events = Counter(
            "kvtide_router_kv_events", "KV events taken", registry=registry
        )
        self._ended = Counter(
            "kvtide_router_requests",
            "requests by how they ended",
            ("code",),
            registry=registry,
        )

    def ended(self, code: str) -> None:
        """A request has ended; ``code`` is empty if it did as it should."""
        self._ended.labels(code or "finished").inc()
