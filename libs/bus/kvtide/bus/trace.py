"""The thread that runs through all messages of one request."""

from kvtide.bus.messages import Message
from kvtide.runtime.tracing import TRACE


def trace_of(message: Message) -> str:
    """The trace to send ``message`` with: the task's own, else the request's id."""
    current = TRACE.get()
    if current:
        return current
    request = getattr(message, "request", "")
    return request if isinstance(request, str) else ""
