"""``/livez``, ``/readyz``, ``/health`` and ``/metrics``."""

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse, Response

from kvtide.gateway.api.door import Door
from kvtide.gateway.api.models import json_response
from kvtide.gateway.api.replies import ReadyReply
from kvtide.runtime.metrics import exposition


def probe_routes(door: Door, registry: CollectorRegistry) -> APIRouter:
    """For those who watch; none of them needs a key."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Response:
        """The process answers."""
        return PlainTextResponse("ok\n")

    @router.get("/readyz")
    async def readyz() -> Response:
        """Whether completions can be answered now, and what is missing."""
        missing = door.served.missing()
        draining = door.gateway.draining
        ready = not missing and not draining
        state = "ready" if ready else "draining" if draining else "loading"
        reply = ReadyReply(ready, state, door.served.name, missing)
        return json_response(reply, 200 if ready else 503)

    router.add_api_route("/health", readyz, methods=["GET"])

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        content_type, body = exposition(registry)
        return Response(body, media_type=content_type)

    del livez, metrics
    return router
