"""What the gateway counts and measures."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtide.bus.messages import RequestEnded
from kvtide.runtime.metrics import LATENCY_BUCKETS_S


class GatewayMetrics:
    """One set per process, in the registry that is passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register all of them."""
        self.requests = Counter(
            "kvtide_gateway_requests_total",
            "Answers by how they ended.",
            ("outcome", "code"),
            registry=registry,
        )
        self.http = Counter(
            "kvtide_gateway_http_responses_total",
            "HTTP responses by route and status.",
            ("route", "status"),
            registry=registry,
        )
        self.open_requests = Gauge(
            "kvtide_gateway_open_requests",
            "Answers that are being made.",
            registry=registry,
        )
        self.ttft_s = Histogram(
            "kvtide_gateway_ttft_seconds",
            "Time from a request to its first token.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.tbt_s = Histogram(
            "kvtide_gateway_tbt_seconds",
            "Mean time between two tokens of an answer.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "kvtide_gateway_e2e_seconds",
            "Time from a request to the end of its answer.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvtide_gateway_prompt_tokens_total",
            "Tokens of prompts of ended requests.",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "kvtide_gateway_cached_tokens_total",
            "Tokens of prompts whose KV came from the pool.",
            registry=registry,
        )
        self.output_tokens = Counter(
            "kvtide_gateway_output_tokens_total",
            "Tokens of answers.",
            registry=registry,
        )
        self.attempts = Counter(
            "kvtide_gateway_attempts_total",
            "Placements of ended requests; more than requests means fail-overs.",
            registry=registry,
        )

    def ended(self, record: RequestEnded) -> None:
        """Count one answer's end."""
        self.requests.labels(record.outcome, record.code).inc()
        self.prompt_tokens.inc(record.prompt_tokens)
        self.cached_tokens.inc(record.cached_tokens)
        self.output_tokens.inc(record.output_tokens)
        self.attempts.inc(record.attempt)
        self.e2e_s.observe(record.total_ms / 1000)
        if record.ttft_ms is not None:
            self.ttft_s.observe(record.ttft_ms / 1000)
        if record.tbt_ms is not None:
            self.tbt_s.observe(record.tbt_ms / 1000)
