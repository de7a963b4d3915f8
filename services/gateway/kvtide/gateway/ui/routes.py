"""``/ui`` and what its pages read, under ``/admin/ui``. The pages hold no data themselves."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from importlib import resources
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import RedirectResponse, Response, StreamingResponse

from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.shell import Gateway
from kvtide.gateway.ui.answers import Answers, CacheView, TargetsView, Unknown
from kvtide.gateway.ui.recent import Recent
from kvtide.gateway.ui.request_view import RequestDetail
from kvtide.gateway.ui.traffic import Traffic
from kvtide.gateway.ui.watch import STEP_S, Watch
from kvtide.runtime import Clock

HOTTEST = 60
KEEP_S = 2.0
"""What the catalog said is shown again for so long, to all pages."""

STREAM_LIMIT = 64
"""Pages that may look at once; each costs a message a second."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_COMMON = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_SAFE = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; frame-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    **_COMMON,
}
REPORT_PAGE = "report.html"
_SAFE_REPORT = {
    "content-security-policy": (
        "sandbox allow-scripts; default-src 'none'; script-src 'self'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'self'"
    ),
    **_COMMON,
}
"""A report brings its own style, and gets an origin of its own."""


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """One request with the decision on it. ``why_not`` says why there is none."""

    detail: RequestDetail
    explanation: object
    why_not: str


def read_files() -> dict[str, tuple[str, bytes]]:
    """Type and bytes of each file that a browser may ask for, by its name."""
    folder = resources.files(__package__ or "").joinpath("static")
    found: dict[str, tuple[str, bytes]] = {}
    for entry in folder.iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[entry.name] = (_TYPES[suffix], entry.read_bytes())
    return found


def page_routes() -> APIRouter:
    """The pages themselves: files without data."""
    router = APIRouter(include_in_schema=False)
    files = read_files()

    @router.get("/ui")
    async def to_pages() -> Response:
        return RedirectResponse("/ui/")

    @router.get("/ui/{name:path}")
    async def page(name: str) -> Response:
        found = files.get(name or "index.html")
        if found is None:
            raise ApiError(404, f"the dashboard has no file {name[:100]!r}")
        headers = _SAFE_REPORT if name == REPORT_PAGE else _SAFE
        return Response(found[1], media_type=found[0], headers=headers)

    del to_pages, page
    return router


def live_routes(watch: Watch, answers: Answers, gateway: Gateway) -> APIRouter:
    """What this gateway has heard: the stream of news, and its requests."""
    router = APIRouter(include_in_schema=False)
    looking = asyncio.Semaphore(STREAM_LIMIT)

    @router.get("/admin/ui/news")
    async def news() -> Response:
        if looking.locked():
            raise ApiError(503, f"{STREAM_LIMIT} pages look already: close one")
        return StreamingResponse(
            _news(watch, gateway, looking),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    @router.get("/admin/ui/requests")
    async def requests(
        text: Annotated[str, Query(max_length=200)] = "",
        state: Annotated[str, Query(max_length=20)] = "",
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        return _json(watch.journal.recent(text=text, state=state, limit=limit))

    @router.get("/admin/ui/requests/{request:path}")
    async def one_request(request: str) -> Response:
        detail = watch.journal.detail(request)
        if detail is None:
            raise ApiError(404, f"this gateway remembers no request {request[:100]!r}")
        explanation, why_not = None, ""
        try:
            explanation = await answers.explanation(request)
        except Unknown as error:
            why_not = str(error)
        return _json(
            RequestPage(detail=detail, explanation=explanation, why_not=why_not)
        )

    del news, requests, one_request
    return router


def asked_routes(
    watch: Watch, answers: Answers, traffic: Traffic, clock: Clock
) -> APIRouter:
    """What others are asked for: the catalog and the nodes' metrics."""
    router = APIRouter(include_in_schema=False)
    caches = Recent[CacheView](clock, keep_s=KEEP_S)
    all_targets = Recent[TargetsView](clock, keep_s=KEEP_S)

    @router.get("/admin/ui/cache")
    async def cache(
        minutes: Annotated[int, Query(ge=1, le=1440)] = 30,
    ) -> Response:
        def ask() -> Awaitable[CacheView]:
            wall_s = clock.wall()
            return answers.cache(
                watch.chains.hottest(clock.monotonic(), HOTTEST),
                since_s=wall_s - 60 * minutes,
                until_s=wall_s + 60,
                step_s=max(5.0, minutes * 60 / 120),
            )

        return _json(await caches.get(minutes, ask))

    @router.get("/admin/ui/targets")
    async def targets() -> Response:
        return _json(await all_targets.get("", lambda: answers.targets(500)))

    @router.get("/admin/ui/traffic")
    async def flows() -> Response:
        return _json(await traffic.view())

    del cache, targets, flows
    return router


async def _news(
    watch: Watch, gateway: Gateway, looking: asyncio.Semaphore
) -> AsyncGenerator[bytes]:
    """Everything once, then each second what changed, until either end goes away."""
    version, at_s = 0, 0.0
    async with looking:
        while not gateway.draining:
            news = watch.news(version, at_s)
            version = news.cluster.version
            at_s = news.points[-1].at_s if news.points else at_s
            yield b"data: " + msgspec.json.encode(news) + b"\n\n"
            await gateway.node.clock.sleep(STEP_S)


def _json(body: object) -> Response:
    return Response(
        msgspec.json.encode(body),
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )
