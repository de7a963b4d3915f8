"""The open spans of the requests that one role of a worker has. Empty while traces are off."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtide.kv import RequestId, RequestRef
from kvtide.runtime.tracing import NO_SPAN, TRACE, Fact, Span, Tracer

MOST_OPEN = 4096


@dataclass(slots=True)
class _Open:
    """A request's own span, those of its stages, and what it was last told of."""

    span: Span
    stages: dict[str, Span] = field(default_factory=dict[str, Span])
    had: set[str] = field(default_factory=set[str])
    cause: str = ""


class RequestSpans:
    """A span for each request from its work's arrival until it is let go.

    Its stages (``queue``, ``chunk``, …) are spans within it. A request that is not
    traced costs a look-up. For one loop.
    """

    def __init__(self, tracer: Tracer, role: str) -> None:
        """Names begin with ``role``."""
        self._tracer = tracer
        self._role = role
        self._open: dict[RequestRef, _Open] = {}

    @property
    def enabled(self) -> bool:
        """Whether anything may ever be recorded."""
        return self._tracer.enabled

    def __len__(self) -> int:
        """Requests that are followed."""
        return len(self._open)

    def arrived(self, ref: RequestRef, **facts: Fact) -> None:
        """Work came; it is part of what this task does now. Twice is once."""
        if ref in self._open:
            return
        span = self._tracer.span(self._role)
        if span is NO_SPAN:
            return
        while len(self._open) >= MOST_OPEN:
            self.ended(next(iter(self._open)), "lost sight of")
        span.note(request=ref.request, attempt=ref.attempt, **facts)
        self._open[ref] = _Open(span)

    def told(self, ref: RequestRef) -> None:
        """Another worker has said something of it, which is what this task handles."""
        one = self._open.get(ref)
        if one is not None:
            one.cause = TRACE.get()

    def began(self, ref: RequestRef, stage: str, **facts: Fact) -> None:
        """A stage begins; one of the same name that is open goes on."""
        one = self._open.get(ref)
        if one is not None and stage not in one.stages:
            name = f"{self._role}.{stage}"
            one.stages[stage] = span = self._tracer.span(name, one.span.trace)
            span.note(**facts)

    def over(self, ref: RequestRef, stage: str, error: str = "") -> None:
        """A stage has ended, if it was open."""
        one = self._open.get(ref)
        if one is not None and stage in one.stages:
            one.stages.pop(stage).end(error)

    def first(self, refs: Iterable[RequestRef], stage: str) -> list[RequestRef]:
        """Begin the stage for those that never had it, which are returned."""
        fresh = [
            ref for ref in refs if ref in self._open and self._is_first(ref, stage)
        ]
        for ref in fresh:
            self.began(ref, stage)
        return fresh

    def _is_first(self, ref: RequestRef, stage: str) -> bool:
        had = self._open[ref].had
        if stage in had:
            return False
        had.add(stage)
        return True

    def operation(self, ref: RequestRef, name: str, *, caused: bool = False) -> Span:
        """A span of its own for what is done of it; of what was told last, if ``caused``."""
        one = self._open.get(ref)
        if one is None:
            return NO_SPAN
        parent = one.cause if caused and one.cause else one.span.trace
        return self._tracer.span(f"{self._role}.{name}", parent)

    def trace(self, ref: RequestRef) -> str:
        """What a message about it is part of: its newest open stage, or itself."""
        one = self._open.get(ref)
        if one is None:
            return ""
        newest = next(reversed(one.stages.values()), one.span)
        return newest.trace

    def ended(self, ref: RequestRef, error: str = "", **facts: Fact) -> None:
        """It is let go, with all of its stages; once is enough."""
        one = self._open.pop(ref, None)
        if one is None:
            return
        for stage in one.stages.values():
            stage.end(error)
        one.span.note(**facts)
        one.span.end(error)


def named_by(thing: object) -> RequestRef | None:
    """The request and attempt that a message or a command names, if it names one."""
    ref = getattr(thing, "ref", None)
    if isinstance(ref, RequestRef):
        return ref
    request, attempt = getattr(thing, "request", None), getattr(thing, "attempt", None)
    if isinstance(request, str) and isinstance(attempt, int):
        return RequestRef(RequestId(request), attempt)
    return None
