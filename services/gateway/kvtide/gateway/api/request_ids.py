"""Pure ASGI middleware: every response has an ``x-request-id`` and is counted."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtide.gateway.metrics import GatewayMetrics
from kvtide.kv import RequestId, cluster_name

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
"""Where Anthropic's clients look for the same."""
_VALID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_STATE = "kvtide_request_id"


class RequestIds:
    """Takes a client's id if it is short and plain, makes one otherwise."""

    def __init__(
        self, app: ASGIApp, *, metrics: GatewayMetrics, routes: frozenset[str]
    ) -> None:
        """``routes`` are the paths that are counted by name."""
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; nothing is buffered, the disconnect stays visible."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        made = uuid.uuid4().hex
        shown = given if _VALID.fullmatch(given) else made
        # within the cluster a name is used once, whatever clients send twice
        unique = cluster_name(given, made) if shown == given else RequestId(made)
        scope.setdefault("state", {})[_STATE] = unique
        path: str = scope["path"]
        route = path if path in self._routes else "other"

        complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = shown
                headers[ANTHROPIC_HEADER] = shown
                self._metrics.http.labels(route, str(message["status"])).inc()
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # a bug that was answered and logged need not end the connection too
            if not complete:
                raise


def request_id(request: Request) -> RequestId:
    """The name of a request within the cluster, unlike that of any other."""
    return request_name(request.scope)


def request_name(scope: Scope) -> RequestId:
    """The same, of a scope."""
    return RequestId(scope["state"][_STATE])
