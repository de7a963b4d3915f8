"""A proxy that hands each request to the next of its servers, in turn."""

import argparse
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HOP = {"host", "content-length", "transfer-encoding", "connection"}


def application(backends: list[str]) -> Starlette:
    """``POST`` goes round; ``GET`` goes to the first, but for ``/health``, our own."""
    turn = itertools.cycle(backends)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)  # noqa: S113

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def health(_: Request) -> Response:
        return Response()

    async def forward(request: Request) -> Response:
        base = next(turn) if request.method == "POST" else backends[0]
        headers = [(k, v) for k, v in request.headers.raw if k.decode() not in HOP]
        asked = client.build_request(
            request.method,
            base + request.url.path,
            headers=headers,
            content=await request.body(),
        )
        answer = await client.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        kept = {k: v for k, v in answer.headers.items() if k not in HOP}
        return StreamingResponse(body(), answer.status_code, kept)

    routes = [
        Route("/health", health),
        Route("/{path:path}", forward, methods=["GET", "POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("backends", nargs="+", help="such as http://127.0.0.1:8001")
    given = parser.parse_args()
    uvicorn.run(
        application(given.backends), port=given.port, log_level="warning", loop="uvloop"
    )


if __name__ == "__main__":
    main()
