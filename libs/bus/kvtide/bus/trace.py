"""The thread that runs through all messages of one request."""

from contextvars import ContextVar

from kvtide.bus.messages import Message

TRACE: ContextVar[str] = ContextVar("kvtide_trace", default="")
"""What the messages that this task sends belong to. Set while a handler runs."""


def trace_of(message: Message) -> str:
    """The trace to send ``message`` with: the task's own, else the request's id."""
    current = TRACE.get()
    if current:
        return current
    request = getattr(message, "request", "")
    return request if isinstance(request, str) else ""
