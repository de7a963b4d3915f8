"""``/v1/responses``."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvtide.gateway.api.answering import answer_chat, frame_of
from kvtide.gateway.api.body import read
from kvtide.gateway.api.dialect import Frame
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.responses.dialect import ResponsesDialect
from kvtide.gateway.api.responses.schemas import ResponsesBody
from kvtide.gateway.api.responses.wanted import chat_of, wanted_of
from kvtide.gateway.api.wanted import Asker


def response_routes(door: Door) -> APIRouter:
    """The one route: nothing is kept, so nothing can be fetched."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        """Answer a chat."""
        body = await read(request, ResponsesBody, door.settings.max_body_bytes)
        asker = Asker.of(request)
        wanted = wanted_of(body)

        def dialect(frame: Frame) -> ResponsesDialect:
            return ResponsesDialect(frame, body)

        return await answer_chat(
            door,
            wanted,
            chat_of(body, wanted.tools, door.picture_limits),
            asker,
            dialect,
            frame_of(
                door,
                asker,
                "resp_",
                wanted.model,
                show_logprobs=wanted.logprobs is not None,
            ),
            stream=bool(body.stream),
        )

    del responses
    return router
