"""Pure ASGI middleware: each request to a model's routes is the root of a trace."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtide.gateway.api.request_ids import request_name
from kvtide.runtime.tracing import NO_SPAN, Tracer

TRACED = "/v1/"
"""What is asked of a model; probes, scrapes and pages would only be in the way."""


class TracedRequests:
    """Follows a client's ``traceparent``, or begins a trace. Only for tracers that record."""

    def __init__(self, app: ASGIApp, tracer: Tracer, routes: frozenset[str]) -> None:
        """``routes`` are the paths that spans are named after."""
        self._app = app
        self._tracer = tracer
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; nothing is buffered."""
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or not path.startswith(TRACED):
            await self._app(scope, receive, send)
            return
        route = path if path in self._routes else "other"
        parent = Headers(scope=scope).get("traceparent", "")
        name = request_name(scope)
        method = str(scope["method"])
        span = self._tracer.root(f"{method} {route}", parent, request=name)
        if span is NO_SPAN:
            await self._app(scope, receive, send)
            return
        is_answering = False

        async def told(message: Message) -> None:
            nonlocal is_answering
            if message["type"] == "http.response.start":
                span.note(status=int(message["status"]))
            elif not is_answering and message.get("body"):
                is_answering = True
                span.mark("first bytes of the answer")
            await send(message)

        with span:
            await self._app(scope, receive, told)
