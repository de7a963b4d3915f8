"""``/v1/models``, ``/tokenize`` and ``/detokenize``."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvtide.gateway.api.body import read
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.openai_wanted import chat_of, tools_of
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.replies import (
    DetokenizeReply,
    ModelList,
    ModelReply,
    TokenizeReply,
)
from kvtide.gateway.api.schemas import DetokenizeBody, TokenizeBody
from kvtide.gateway.api.tools import ToolUse
from kvtide.kv import ModelFacts


def json_response(reply: msgspec.Struct, status: int = 200) -> Response:
    """A body made of one of our reply types."""
    return Response(msgspec.json.encode(reply), status, media_type="application/json")


def model_routes(door: Door) -> APIRouter:
    """What is served, and its text as tokens."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The served model, and it with each adapter."""
        names = (door.served.name, *sorted(door.served.adapters()))
        return json_response(ModelList([_model(door, name) for name in names]))

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        """One model."""
        door.check_model(name)
        return json_response(_model(door, name))

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The ids that a prompt or a chat would be served with."""
        body = await read(request, TokenizeBody, door.settings.max_body_bytes)
        if body.model is not None:
            door.check_model(body.model)
        ids = await _encode(door, body)
        return json_response(_tokens(door, ids, strings=bool(body.return_token_strs)))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of ids, special tokens by name."""
        body = await read(request, DetokenizeBody, door.settings.max_body_bytes)
        if body.model is not None:
            door.check_model(body.model)
        size = door.served.text.vocab_size
        strange = next((token for token in body.tokens if token >= size), None)
        if strange is not None:
            raise bad_param("tokens", f"tokens: token {strange} is not below {size}")
        return json_response(DetokenizeReply(await door.served.decode(body.tokens)))

    del list_models, get_model, tokenize, detokenize
    return router


def _model(door: Door, name: str) -> ModelReply:
    facts = door.served.find_facts(name)
    longest = facts.max_tokens if facts is not None else None
    base = door.served.name
    parent = None if name == base else base
    return ModelReply(name, door.served.created_s, longest, root=name, parent=parent)


async def _encode(door: Door, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_param("prompt", "give either prompt or messages")
    if body.messages is not None:
        use = ToolUse(tools_of(body.tools))
        return await door.served.encode_chat(chat_of(body, use, door.text_alone))
    return await door.served.encode_prompt(
        body.prompt or "", add_special_tokens=body.add_special_tokens is not False
    )


def _tokens(door: Door, ids: list[int], *, strings: bool) -> TokenizeReply:
    facts: ModelFacts | None = door.served.find_facts()
    size = facts.block_tokens if facts is not None else None
    names = [door.served.text.token_name(i) for i in ids] if strings else None
    return TokenizeReply(
        count=len(ids),
        max_model_len=facts.max_tokens if facts is not None else None,
        tokens=ids,
        token_strs=names,
        block_tokens=size,
        block_starts=list(range(0, len(ids), size)) if size else [],
        keys=len(ids) // size if size else 0,
    )
