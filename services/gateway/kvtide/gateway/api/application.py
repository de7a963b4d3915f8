"""The ASGI application: routes, error objects, request ids."""

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from kvtide.gateway.api.completions import completion_routes
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.models import model_routes
from kvtide.gateway.api.probes import probe_routes
from kvtide.gateway.api.problem_handlers import add_problem_handlers
from kvtide.gateway.api.request_ids import RequestIds
from kvtide.runtime.metrics import version


def make_application(door: Door, registry: CollectorRegistry) -> FastAPI:
    """Everything over HTTP. Only pure ASGI middleware: others hide the disconnect."""
    app = FastAPI(title="kvtide", version=version(), redirect_slashes=False)
    app.include_router(completion_routes(door))
    app.include_router(model_routes(door))
    app.include_router(probe_routes(door, registry))
    add_problem_handlers(app)
    paths = frozenset(r.path for r in app.routes if isinstance(r, Route))
    app.add_middleware(RequestIds, metrics=door.metrics, routes=paths)
    return app
