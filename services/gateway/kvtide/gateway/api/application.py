"""The ASGI application: routes, error objects, request ids."""

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import ASGIApp

from kvtide.gateway.access.admin import admin_routes
from kvtide.gateway.access.cors import cross_origin
from kvtide.gateway.access.gate import KeyGate
from kvtide.gateway.api.anthropic.routes import message_routes
from kvtide.gateway.api.completions import completion_routes
from kvtide.gateway.api.document import DescribedApi
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.models import model_routes
from kvtide.gateway.api.probes import probe_routes
from kvtide.gateway.api.problem_handlers import add_problem_handlers
from kvtide.gateway.api.request_ids import RequestIds
from kvtide.gateway.api.responses.routes import response_routes
from kvtide.gateway.api.traced import TracedRequests
from kvtide.runtime.metrics import version


def make_application(
    door: Door, registry: CollectorRegistry, pages: tuple[APIRouter, ...] = ()
) -> ASGIApp:
    """Everything over HTTP. Only pure ASGI middleware: others hide the disconnect."""
    app = DescribedApi(title="kvtide", version=version(), redirect_slashes=False)
    routers = (
        completion_routes(door),
        response_routes(door),
        message_routes(door),
        model_routes(door),
        probe_routes(door, registry),
        admin_routes(door),
        *pages,
    )
    for router in routers:
        app.include_router(router)
    add_problem_handlers(app)
    paths = frozenset(
        route.path
        for router in routers
        for route in router.routes
        if isinstance(route, Route)
    )
    gated = KeyGate(app, door.access.keys, door.access.audit)
    inner: ASGIApp = cross_origin(gated, door.settings.cors)
    tracer = door.gateway.node.tracer
    if tracer.enabled:
        inner = TracedRequests(inner, tracer, paths)
    # outside of everything, so that the answer to a bug has an id too
    return RequestIds(inner, metrics=door.metrics, routes=paths)
