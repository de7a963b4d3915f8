"""What a conductor counts."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtide.bus.messages import (
    Admit,
    CandidateEstimate,
    ConductorLoad,
    DropExtras,
    Placed,
    Replicate,
    RequestEnded,
)
from kvtide.conductor.commands import Answer
from kvtide.conductor.prediction_metrics import PredictionMetrics
from kvtide.conductor.reducers.roles import RoleAdvice
from kvtide.conductor.worker_metrics import WorkerMetrics
from kvtide.policy.class_costs import FitErrors

_DECISION_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5,
)  # fmt: skip


class ConductorMetrics:
    """``kvtide_conductor_…`` of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register; once a registry."""
        self._decisions = Counter(
            "kvtide_conductor_decisions",
            "Admissions by verdict: placed, direct (decode alone), or why rejected",
            ["verdict"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "kvtide_conductor_prompt_tokens",
            "Tokens of placed prompts by where they are expected to come from",
            ["source"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kvtide_conductor_decision_seconds",
            "From an admission's arrival to its answer",
            buckets=_DECISION_BUCKETS_S,
            registry=registry,
        )
        self._ended = Counter(
            "kvtide_conductor_requests_ended",
            "Terminal answers heard, by outcome",
            ["outcome"],
            registry=registry,
        )
        self._lost = Counter(
            "kvtide_conductor_messages_lost",
            "Messages that came faster than they could be taken, by subject",
            ["subject"],
            registry=registry,
        )
        self._ttft = PredictionMetrics("ttft", "time to first token", registry)
        self._tbt = PredictionMetrics("tbt", "time between tokens", registry)
        self._copies = Counter(
            "kvtide_conductor_replica_orders",
            "Copies that stores were told to make, by reason, or to drop (cold)",
            ["reason"],
            registry=registry,
        )
        self._blocks = Gauge(
            "kvtide_conductor_indexed_blocks", "Keys in the index", registry=registry
        )
        self._bookings = Gauge(
            "kvtide_conductor_bookings", "Requests in the book", registry=registry
        )
        self._exact = Gauge(
            "kvtide_conductor_index_exact",
            "1 when all stores' blocks are known",
            registry=registry,
        )

        self._workers = WorkerMetrics(registry)

    def advice(self, advice: Sequence[RoleAdvice]) -> None:
        """How loaded both roles are."""
        self._workers.advice(advice)

    def fits(self, errors: Mapping[str, FitErrors]) -> None:
        """How far off the fitted costs are."""
        self._workers.fits(errors)

    def decided(self, admit: Admit, answer: Answer, seconds: float) -> None:
        """An admission was answered."""
        self._seconds.observe(max(0.0, seconds))
        if not isinstance(answer, Placed):
            self._decisions.labels(answer.code.value).inc()
            return
        verdict = "direct" if answer.prefill is None else "placed"
        self._decisions.labels(verdict).inc()
        hit_tokens = answer.chosen.hit_tokens
        self._prompt_tokens.labels("pool").inc(hit_tokens)
        new_tokens = max(0, admit.prompt_tokens - hit_tokens)
        self._prompt_tokens.labels("computed").inc(new_tokens)

    def load(self, load: ConductorLoad) -> None:
        """The load as it is reported."""
        self._blocks.set(load.indexed_blocks)
        self._bookings.set(load.bookings)
        self._exact.set(load.exact)

    def ended(self, ended: RequestEnded, predicted: CandidateEstimate | None) -> None:
        """A terminal answer was heard; ``predicted`` if this one placed it."""
        self._ended.labels(ended.outcome.value).inc()
        if predicted is None:
            return
        if ended.ttft_ms:
            self._ttft.observed(predicted.ttft_ms, ended.ttft_ms)
        if ended.tbt_ms:
            self._tbt.observed(predicted.tbt_ms, ended.tbt_ms)

    def told(self, message: Replicate | DropExtras) -> None:
        """A store was told to make or drop copies."""
        match message:
            case Replicate(reason=reason, located=located):
                keys = {each.key for each in located}
                self._copies.labels(reason.value).inc(len(keys))
            case DropExtras(keys=keys):
                self._copies.labels("cold").inc(len(keys))

    def lost(self, subject: str, count: int) -> None:
        """Messages were dropped."""
        self._lost.labels(subject).inc(count)
