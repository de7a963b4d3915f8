"""Traces: the seam between those who do work and whoever records how long it took.

What a task does belongs to the trace in ``TRACE``. The bus sends it in envelopes and
sets it while a handler runs; transfer sends it in frames. A span that is entered is the
parent of what is begun within. While traces are off nothing is made: ``NO_TRACES``
gives ``NO_SPAN`` to everybody.

    with tracer.span("load") as span:
        span.note(blocks=await load())
"""

import re
from contextvars import ContextVar
from enum import StrEnum
from types import TracebackType
from typing import Self

Fact = str | int | float | bool

TRACE: ContextVar[str] = ContextVar("kvtide_trace", default="")
"""What this task's work belongs to: a W3C traceparent where it is recorded, and else
"" or the request's name."""

_RECORDED = re.compile(
    r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]"
)
_RECORDED_CHARS = 55


class SpanKind(StrEnum):
    """Which side of a call a span is of."""

    INSIDE = "internal"
    SERVER = "server"
    CLIENT = "client"


def recorded(trace: str) -> str:
    """``trace`` if it is a W3C traceparent of a trace that is recorded, else ""."""
    is_recorded = len(trace) == _RECORDED_CHARS and _RECORDED.fullmatch(trace)
    return trace if is_recorded else ""


class Span:
    """A piece of work of a trace; this one records nothing. Of any thread, one at a time."""

    trace: str = ""
    """The traceparent of what is done within; "" if nothing is recorded."""

    def note(self, **facts: Fact) -> None:
        """Say something about it."""

    def mark(self, name: str) -> None:
        """Say that something happened now."""

    def end(self, error: str = "") -> None:
        """It is over, for a reason if it went wrong. Only the first end counts."""

    def __enter__(self) -> Self:
        """What this task begins from here on is part of it."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; an exception is its error."""


NO_SPAN = Span()


class Tracer:
    """Makes spans; this one makes none."""

    enabled: bool = False

    def root(self, name: str, parent: str, **facts: Fact) -> Span:
        """Begin to answer somebody outside, whose traceparent may be anything."""
        del name, parent, facts
        return NO_SPAN

    def span(
        self,
        name: str,
        parent: str | None = None,
        kind: SpanKind = SpanKind.INSIDE,
        **facts: Fact,
    ) -> Span:
        """Begin a part of ``parent`` (None: of what the task does now).

        ``NO_SPAN`` if that is not recorded.
        """
        del name, parent, kind, facts
        return NO_SPAN

    def close(self) -> None:
        """Send what waits, within a few seconds. Blocks."""


NO_TRACES = Tracer()
