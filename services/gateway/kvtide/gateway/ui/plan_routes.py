"""The Plan page: what it starts from, and a plan on the recent load."""

from importlib import resources

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from kvtide.gateway.api.body import read
from kvtide.gateway.api.problems import SERVER, ApiError
from kvtide.gateway.ui.planner import (
    LIMIT_S,
    MOST_REQUESTS,
    NothingLoggedError,
    PlanBusyError,
    PlanEndedError,
    Planner,
    PlanQuestion,
    PlanRefusedError,
)

_USUAL_BLOCK_TOKENS = 512
_MOST_BODY_BYTES = 128 * 1024
_MOST_CLUSTER_CHARS = 64 * 1024


class PlanBody(BaseModel):
    """The newest ``requests`` of the log, ``rate`` times as dense, on ``cluster``."""

    model_config = ConfigDict(extra="forbid")

    cluster: str = Field(min_length=1, max_length=_MOST_CLUSTER_CHARS)
    requests: int = Field(default=500, ge=1, le=MOST_REQUESTS)
    rate: float = Field(default=1.0, gt=0, le=1000)
    ttft_ms: float = Field(default=30_000.0, gt=0, le=1e7)
    tbt_ms: float = Field(default=200.0, gt=0, le=1e7)


class PlanStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the page begins with. ``log`` "": none is kept."""

    log: str
    empty: bool
    cluster: str
    limit_s: float


class PlanReply(msgspec.Struct, frozen=True, kw_only=True):
    """The report as a page of its own, what was said, and of how many requests."""

    html: str
    said: str
    requests: int


def plan_routes(planner: Planner) -> APIRouter:
    """For admins once there are keys, as everything under ``/admin/ui``."""
    router = APIRouter(include_in_schema=False)

    @router.get("/admin/ui/plan")
    async def start() -> Response:
        log = "" if planner.log is None else str(planner.log)
        block_tokens = await planner.block_tokens()
        return _json(
            PlanStart(
                log=log,
                cluster=example_cluster(block_tokens or _USUAL_BLOCK_TOKENS),
                empty=block_tokens is None,
                limit_s=LIMIT_S,
            )
        )

    @router.post("/admin/ui/plan")
    async def plan(request: Request) -> Response:
        # a page of another site can send no JSON here without being asked first
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":
            raise ApiError(415, "a plan is asked for with application/json")
        body = await read(request, PlanBody, _MOST_BODY_BYTES)
        asked = PlanQuestion(
            body.cluster, body.requests, body.rate, body.ttft_ms, body.tbt_ms
        )
        try:
            made = await planner.plan(asked)
        except (NothingLoggedError, PlanBusyError) as error:
            raise ApiError(409, str(error)) from error
        except PlanRefusedError as error:
            raise ApiError(400, str(error), param="cluster") from error
        except PlanEndedError as error:
            raise ApiError(503, str(error), kind=SERVER) from error
        return _json(PlanReply(html=made.html, said=made.said, requests=made.requests))

    del start, plan
    return router


def example_cluster(block_tokens: int) -> str:
    """A cluster to begin with, for a log with blocks of so many tokens."""
    text = resources.files(__package__ or "").joinpath("cluster.toml").read_text()
    usual = f"block_tokens = {_USUAL_BLOCK_TOKENS}"
    return text.replace(usual, f"block_tokens = {block_tokens}")


def _json(body: object) -> Response:
    return Response(
        msgspec.json.encode(body),
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )
