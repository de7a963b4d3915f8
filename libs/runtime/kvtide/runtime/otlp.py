"""Traces to an OTLP collector: spans wait in a bounded queue, a thread sends them."""

import asyncio
from types import TracebackType
from typing import Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span as OtelSpan,
    SpanContext,
    SpanKind as OtelKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from typing_extensions import override

from kvtide.runtime.metrics import version
from kvtide.runtime.tracing import (
    NO_SPAN,
    TRACE,
    Fact,
    Span,
    SpanKind,
    Tracer,
    recorded,
)

PATH = "/v1/traces"
QUEUE_SPANS = 4096
SEND_EVERY_MS = 1000
SEND_TIMEOUT_S = 3.0
CLOSE_LIMIT_S = 4.0
_PARENT_PARTS = 4
_KINDS = {
    SpanKind.INSIDE: OtelKind.INTERNAL,
    SpanKind.SERVER: OtelKind.SERVER,
    SpanKind.CLIENT: OtelKind.CLIENT,
}


class OtlpSpan(Span):
    """See ``Span``."""

    def __init__(self, span: OtelSpan) -> None:
        """Follow a span that has begun and is recorded."""
        self._span = span
        context = span.get_span_context()
        self.trace = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}"
            f"-{context.trace_flags:02x}"
        )
        self._before = ""

    @override
    def note(self, **facts: Fact) -> None:
        self._span.set_attributes(_named(facts))

    @override
    def mark(self, name: str) -> None:
        self._span.add_event(name)

    @override
    def end(self, error: str = "") -> None:
        if not self._span.is_recording():
            return
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    @override
    def __enter__(self) -> Self:
        self._before = TRACE.get()
        TRACE.set(self.trace)
        return self

    @override
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        TRACE.set(self._before)
        # of an exception only the kind: its text may quote what a client sent
        self.end("" if exc_type is None else exc_type.__name__)


class OtlpTracer(Tracer):
    """Sends to ``url`` + ``/v1/traces``. From any thread."""

    enabled = True

    def __init__(
        self, url: str, *, service: str, node: str, cluster: str, share: float
    ) -> None:
        """``share`` of the traces that begin here are recorded, 0 to 1."""
        resource = Resource.create(
            {
                "service.name": service,
                "service.namespace": cluster,
                "service.instance.id": node,
                "service.version": version(),
            }
        )
        exporter = OTLPSpanExporter(url.rstrip("/") + PATH, timeout=SEND_TIMEOUT_S)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
            resource=resource,
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attributes=32, max_events=32),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=QUEUE_SPANS,
                schedule_delay_millis=SEND_EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("kvtide")

    @override
    def root(self, name: str, parent: str, **facts: Fact) -> Span:
        outside = _context(parent)
        around = None if outside is None else set_span_in_context(outside)
        span = self._tracer.start_span(
            name, around, kind=OtelKind.SERVER, attributes=_named(facts)
        )
        return OtlpSpan(span) if span.is_recording() else NO_SPAN

    @override
    def span(
        self,
        name: str,
        parent: str | None = None,
        kind: SpanKind = SpanKind.INSIDE,
        **facts: Fact,
    ) -> Span:
        context = _context(recorded(TRACE.get() if parent is None else parent))
        if context is None:
            return NO_SPAN
        span = self._tracer.start_span(
            name,
            set_span_in_context(context),
            kind=_KINDS[kind],
            attributes=_named(facts),
        )
        return OtlpSpan(span) if span.is_recording() else NO_SPAN

    @override
    def close(self) -> None:
        self._provider.shutdown()

    async def aclose(self) -> None:
        """Close beside the loop."""
        await asyncio.to_thread(self.close)


def _named(facts: dict[str, Fact]) -> dict[str, Fact]:
    """As attributes: OpenTelemetry's names have dots, ours are the project's own."""
    return {f"kvtide.{name}": value for name, value in facts.items()}


def _context(traceparent: str) -> NonRecordingSpan | None:
    """What a W3C traceparent says; None if it says nothing."""
    parts = traceparent.strip().split("-")
    if len(parts) != _PARENT_PARTS or parts[0] != "00":
        return None
    sizes = [len(part) for part in parts]
    if sizes != [2, 32, 16, 2] or not all(map(_is_hex, parts)):
        return None
    trace_id, span_id, flags = (int(part, 16) for part in parts[1:])
    context = SpanContext(trace_id, span_id, True, TraceFlags(flags & 1))
    return NonRecordingSpan(context) if context.is_valid else None


def _is_hex(part: str) -> bool:
    return all(char in "0123456789abcdef" for char in part)
