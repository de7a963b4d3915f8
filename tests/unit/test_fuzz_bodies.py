"""Any body of a request is one that the API takes, or a 4xx that says what is wrong."""

from contextlib import suppress

import pytest
from pydantic import BaseModel
from tests.unit.fuzzing import ROUNDS, Target, fuzz
from tests.unit.picture_files import JPEG, WEBPS

from kvtide.engine.picture_heads import BadPictureError, size_of
from kvtide.gateway.api.anthropic.schemas import MessagesBody
from kvtide.gateway.api.body import parse
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.api.responses.schemas import ResponsesBody
from kvtide.gateway.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

CHAT = b"""{"model": "m", "messages": [{"role": "user", "content": [{"type": "text",
 "text": "a"}]}, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function",
 "function": {"name": "f", "arguments": "{}"}}]}], "stop": ["a"], "n": 2, "logit_bias":
 {"1": -1}, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
 "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}}"""
BODIES: dict[type[BaseModel], tuple[bytes, ...]] = {
    ChatBody: (CHAT,),
    CompletionBody: (b'{"model": "m", "prompt": [1, 2], "max_tokens": 4, "seed": 7}',),
    TokenizeBody: (b'{"model": "m", "prompt": "a"}',),
    DetokenizeBody: (b'{"model": "m", "tokens": [1, 2]}',),
    MessagesBody: (
        b'{"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}',
        b"""{"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [
 {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}},
 {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}]}]}]}""",
    ),
    ResponsesBody: (
        b'{"model": "m", "input": "a"}',
        b"""{"model": "m", "input": [{"role": "user", "content": [{"type": "input_image",
 "image_url": "data:image/png;base64,eA=="}]}, {"type": "function_call_output",
 "call_id": "1", "output": [{"type": "input_text", "text": "a"}]}]}""",
    ),
}
HOSTILE = [
    b"[" * 100_000,
    b'{"messages":' * 100_000,
    b'{"n": ' + b"9" * 5000 + b"}",
    b'{"max_tokens": 1e400}',
    b'{"temperature": NaN}',
    b'{"model": "\\ud800"}',
    b'{"model": "' + b"\xff" * 10 + b'"}',
    b'{"a": 1, "a": 2}' * 2,
    b"\x00",
    b"",
]


def taken(model: type[BaseModel], data: bytes) -> object:
    """The body, or an error that blames the client."""
    try:
        return parse(model, data)
    except ApiError as error:
        if not 400 <= error.status < 500:
            raise AssertionError(error.status) from error
        raise


def target(model: type[BaseModel]) -> Target:
    return Target(
        model.__name__, lambda data: taken(model, data), (ApiError,), BODIES[model]
    )


PICTURES = Target("pictures", size_of, (BadPictureError,), (JPEG, *WEBPS.values()))


def targets() -> list[Target]:
    return [*(target(model) for model in BODIES), PICTURES]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("body", targets(), ids=lambda body: body.name)
def test_any_body_is_taken_or_a_4xx(body: Target, rounds: int) -> None:
    fuzz(body, rounds)


@pytest.mark.parametrize("model", list(BODIES), ids=lambda model: model.__name__)
def test_hostile_bodies_are_taken_or_a_4xx(model: type[BaseModel]) -> None:
    for data in HOSTILE:
        with suppress(ApiError):
            taken(model, data)
    with pytest.raises(ApiError):
        taken(model, HOSTILE[0])
