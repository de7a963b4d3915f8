"""A real OTLP receiver: an HTTP server in this process that decodes the protobuf."""

import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from typing_extensions import override


@dataclass(frozen=True)
class SeenSpan:
    """One span as it came over the wire."""

    name: str
    service: str
    node: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    facts: dict[str, Any]
    marks: tuple[str, ...]
    error: str


class OtlpReceiver:
    """Listens on a free port; keeps all spans. Use as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[SeenSpan] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path != "/v1/traces":
                    self.send_error(404)
                    return
                receiver.take(body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            @override
            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        found = [
            _seen(span, _facts(group.resource.attributes))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found

    def spans(self) -> list[SeenSpan]:
        with self._lock:
            return list(self._spans)

    def trace(self, trace: str) -> dict[str, SeenSpan]:
        """The spans of one trace, by id."""
        return {span.id: span for span in self.spans() if span.trace == trace}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        service=resource["service.name"],
        node=resource["service.instance.id"],
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        facts=_facts(span.attributes),
        marks=tuple(event.name for event in span.events),
        error=span.status.message,
    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes
    }


def chain(spans: dict[str, SeenSpan], span: SeenSpan) -> list[str]:
    """``service: name`` of the span and all that it is part of, the root first."""
    line: list[str] = []
    at: SeenSpan | None = span
    while at is not None:
        line.append(f"{at.service}: {at.name}")
        at = spans.get(at.parent)
    return line[::-1]


def missing(spans: dict[str, SeenSpan], wanted: dict[str, int]) -> dict[str, int]:
    """Which of the wanted ``service: name`` have not come as often yet."""
    counts: defaultdict[str, int] = defaultdict(int)
    for span in spans.values():
        counts[f"{span.service}: {span.name}"] += 1
    return {name: count for name, count in wanted.items() if counts[name] < count}
