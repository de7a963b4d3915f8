"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvtide.gateway.api.answering import answer_chat, frame_of
from kvtide.gateway.api.anthropic.dialect import MessagesDialect
from kvtide.gateway.api.anthropic.replies import CountReply
from kvtide.gateway.api.anthropic.schemas import MessagesBody, PromptBody
from kvtide.gateway.api.anthropic.wanted import chat_of, use_of, wanted_of
from kvtide.gateway.api.body import read
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.models import json_response
from kvtide.gateway.api.wanted import Asker


def message_routes(door: Door) -> APIRouter:
    """Both routes."""
    router = APIRouter()

    @router.post("/v1/messages")
    async def messages(request: Request) -> Response:
        """Answer a chat."""
        body = await read(request, MessagesBody, door.settings.max_body_bytes)
        asker = Asker.of(request)
        wanted = wanted_of(body)
        return await answer_chat(
            door,
            wanted,
            chat_of(body, wanted.tools, door.picture_limits),
            asker,
            MessagesDialect,
            frame_of(door, asker, "msg_", wanted.model),
            stream=bool(body.stream),
        )

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of such a chat has."""
        body = await read(request, PromptBody, door.settings.max_body_bytes)
        door.check_model(body.model)
        chat = chat_of(body, use_of(body), door.text_alone)
        ids = await door.served.encode_chat(chat)
        return json_response(CountReply(len(ids)))

    del messages, count_tokens
    return router
