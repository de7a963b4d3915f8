"""``/v1/chat/completions`` and ``/v1/completions``."""

from collections.abc import Sequence
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvtide.gateway.api.answer_response import AnswerResponse
from kvtide.gateway.api.asking import check_body, logprobs_of, questions_of
from kvtide.gateway.api.body import read
from kvtide.gateway.api.dialects import ChatDialect, Frame, TextDialect
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.messages import template_messages, template_variables
from kvtide.gateway.api.request_ids import request_id
from kvtide.gateway.api.schemas import ChatBody, CompletionBody, GenerationBody
from kvtide.gateway.api.wishes import wishes_of


def completion_routes(door: Door) -> APIRouter:
    """Both routes, stream or not."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        body = await read(request, ChatBody, door.settings.max_body_bytes)
        wishes = wishes_of(request)
        check_body(door, body, prompts=1)
        door.served.facts()  # refuse before the work of tokenising
        prompt = await door.served.encode_chat(
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=template_variables(body.chat_template_kwargs),
        )
        questions = await questions_of(
            door,
            body,
            [prompt],
            param="messages",
            request_id=request_id(request),
            wishes=wishes,
        )
        dialect = ChatDialect(_frame(door, body, request, "chatcmpl-"))
        return AnswerResponse(door, questions, dialect, stream=bool(body.stream))

    @router.post("/v1/completions", openapi_extra=_body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """Go on with one or more prompts."""
        body = await read(request, CompletionBody, door.settings.max_body_bytes)
        wishes = wishes_of(request)
        texts = _prompts(body)
        check_body(door, body, prompts=len(texts))
        door.served.facts()
        prompts = [await _ids(door, body, text) for text in texts]
        questions = await questions_of(
            door,
            body,
            prompts,
            param="prompt",
            request_id=request_id(request),
            wishes=wishes,
        )
        dialect = TextDialect(_frame(door, body, request, "cmpl-"))
        return AnswerResponse(door, questions, dialect, stream=bool(body.stream))

    del chat_completions, completions
    return router


async def _ids(door: Door, body: CompletionBody, text: str | list[int]) -> list[int]:
    if not isinstance(text, str):
        return text
    special = body.add_special_tokens is not False
    return await door.served.encode_prompt(text, add_special_tokens=special)


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """One or more prompts, each text or ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [cast("list[int]", prompt)]
    # an empty list is one empty prompt, which is refused like any other
    return cast("list[str] | list[list[int]]", prompt) or [[]]


def _frame(door: Door, body: GenerationBody, request: Request, prefix: str) -> Frame:
    options = body.stream_options
    facts = door.served.find_facts()
    return Frame(
        id=prefix + request_id(request),
        created=int(door.gateway.node.clock.wall()),
        model=door.served.name,
        fingerprint=f"kvtide-{facts.digest[:12]}" if facts is not None else "kvtide",
        include_usage=options is not None and options.include_usage is True,
        show_ids=body.return_token_ids is True,
        show_logprobs=logprobs_of(body) is not None,
        show_insight=wishes_of(request).debug,
    )


def _body_schema(model: type[GenerationBody]) -> dict[str, Any]:
    """Bodies are read by hand, within limits; this keeps them in the documentation."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}
