"""``/v1/chat/completions`` and ``/v1/completions``."""

from collections.abc import Sequence
from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvtide.gateway.api.answer_response import AnswerResponse
from kvtide.gateway.api.answering import answer_chat, frame_of
from kvtide.gateway.api.asking import Prompts, check_wanted, questions_of
from kvtide.gateway.api.body import read
from kvtide.gateway.api.chat_dialect import ChatDialect
from kvtide.gateway.api.dialect import Frame
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.openai_wanted import chat_of, wanted_of
from kvtide.gateway.api.schemas import ChatBody, CompletionBody, GenerationBody
from kvtide.gateway.api.text_dialect import TextDialect
from kvtide.gateway.api.wanted import Asker, Wanted

AnyPrompt = str | list[int]


def completion_routes(door: Door) -> APIRouter:
    """Both routes, stream or not."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        body = await read(request, ChatBody, door.settings.max_body_bytes)
        asker = Asker.of(request)
        wanted = wanted_of(body)
        return await answer_chat(
            door,
            wanted,
            chat_of(body, wanted.tools, door.picture_limits),
            asker,
            ChatDialect,
            _frame(door, body, wanted, asker, "chatcmpl-"),
            stream=bool(body.stream),
        )

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Go on with one or more prompts."""
        body = await read(request, CompletionBody, door.settings.max_body_bytes)
        asker = Asker.of(request)
        wanted = wanted_of(body)
        given = _prompts(body)
        check_wanted(door, wanted, prompts=len(given))
        ids = [await _ids(door, body, prompt) for prompt in given]
        questions = await questions_of(door, wanted, Prompts(ids, "prompt"), asker)
        echoed = await _echoed(door, given, wanted.count) if body.echo else []
        frame = _frame(door, body, wanted, asker, "cmpl-")
        dialect = TextDialect(frame, echoed)
        return AnswerResponse(door, questions, dialect, stream=bool(body.stream))

    del chat_completions, completions
    return router


async def _ids(door: Door, body: CompletionBody, prompt: AnyPrompt) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    special = body.add_special_tokens is not False
    return await door.served.encode_prompt(prompt, add_special_tokens=special)


async def _echoed(door: Door, prompts: Sequence[AnyPrompt], count: int) -> list[str]:
    """The prompt's text in front of each answer."""
    texts: list[str] = []
    for prompt in prompts:
        is_text = isinstance(prompt, str)
        text = prompt if is_text else await door.served.decode(prompt)
        texts += [text] * count
    return texts


def _prompts(body: CompletionBody) -> Sequence[AnyPrompt]:
    """One or more prompts, each text or ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [cast("list[int]", prompt)]
    # an empty list is one empty prompt, which is refused like any other
    return cast("list[str] | list[list[int]]", prompt) or [[]]


def _frame(
    door: Door, body: GenerationBody, wanted: Wanted, asker: Asker, prefix: str
) -> Frame:
    options = body.stream_options
    return frame_of(
        door,
        asker,
        prefix,
        wanted.model,
        include_usage=options is not None and options.include_usage is True,
        show_ids=body.return_token_ids is True,
        show_logprobs=wanted.logprobs is not None,
    )
