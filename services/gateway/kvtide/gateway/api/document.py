"""The OpenAPI document: bodies, replies and errors of every route of the API.

Bodies are read by hand, within limits, and replies are made by hand; this is where both
are told, from the very types that do it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from kvtide.gateway.api.anthropic import (
    replies as anthropic_replies,
    schemas as anthropic,
)
from kvtide.gateway.api.problems import AnthropicErrorReply, ErrorReply
from kvtide.gateway.api.replies import (
    ChatChoice,
    CompletionReply,
    DetokenizeReply,
    ModelList,
    ModelReply,
    ReadyReply,
    TextChoice,
    TokenizeReply,
)
from kvtide.gateway.api.responses import (
    replies as responses_replies,
    schemas as responses,
)
from kvtide.gateway.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from kvtide.gateway.api.wishes import (
    DEBUG_HEADER,
    MOST_MS,
    PRIORITY_HEADER,
    PROGRESS_HEADER,
    TBT_HEADER,
    TTFT_HEADER,
)

Json = dict[str, Any]

_REFS = "#/components/schemas/"
_ERRORS = {
    400: "The request is wrong; ``param`` names the field",
    401: "No valid API key",
    403: "This key may not do that",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "The tenant's own limit",
    500: "The answer failed",
    503: "Not now; ``Retry-After`` says when",
    504: "It took too long",
}
_JSON = "application/json"
_STREAM = "text/event-stream"
_TEXT = "text/plain"
_EVENT: Json = {
    "description": "One event of the stream; its data are JSON, or the word [DONE]",
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


@dataclass(frozen=True, slots=True)
class Told:
    """A route: the type of its body and of its reply (None: plain text).

    ``answers``: it makes tokens, so it streams if asked to, and headers have wishes.
    """

    body: type[BaseModel] | None
    reply: type[msgspec.Struct] | None
    answers: bool = False
    error: type[msgspec.Struct] = ErrorReply
    also: tuple[int, ...] = ()


_ROUTES: Mapping[tuple[str, str], Told] = {
    ("post", "/v1/chat/completions"): Told(
        ChatBody, CompletionReply[ChatChoice], answers=True
    ),
    ("post", "/v1/completions"): Told(
        CompletionBody, CompletionReply[TextChoice], answers=True
    ),
    ("post", "/v1/responses"): Told(
        responses.ResponsesBody, responses_replies.ResponseReply, answers=True
    ),
    ("post", "/v1/messages"): Told(
        anthropic.MessagesBody,
        anthropic_replies.MessageReply,
        answers=True,
        error=AnthropicErrorReply,
    ),
    ("post", "/v1/messages/count_tokens"): Told(
        anthropic.PromptBody, anthropic_replies.CountReply, error=AnthropicErrorReply
    ),
    ("get", "/v1/models"): Told(None, ModelList),
    ("get", "/v1/models/{name}"): Told(None, ModelReply),
    ("post", "/tokenize"): Told(TokenizeBody, TokenizeReply),
    ("post", "/detokenize"): Told(DetokenizeBody, DetokenizeReply),
    ("get", "/livez"): Told(None, None),
    ("get", "/readyz"): Told(None, ReadyReply, also=(503,)),
    ("get", "/health"): Told(None, ReadyReply, also=(503,)),
    ("get", "/metrics"): Told(None, None),
}


class DescribedApi(FastAPI):
    """An application whose document is made here, once it is asked for."""

    def openapi(self) -> Json:
        """See ``describe``."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(self)
        return self.openapi_schema


def describe(app: FastAPI) -> Json:
    """The document of ``app``, whose routes are all there."""
    made: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: Json = made.setdefault("components", {}).setdefault("schemas", {})
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            told = _ROUTES.get((method, path))
            if told is not None:
                _tell(operation, told, schemas)
    return made


def _tell(operation: Json, told: Told, schemas: Json) -> None:
    if told.body is not None:
        body = {"schema": _of_body(told.body, schemas)}
        operation["requestBody"] = {"required": True, "content": {_JSON: body}}
    if told.answers:
        operation["parameters"] = list(_wishes())
    content: Json = {_TEXT: {"schema": {"type": "string"}}}
    if told.reply is not None:
        content = {_JSON: {"schema": _of_struct(told.reply, schemas)}}
    if told.answers:
        content[_STREAM] = {"schema": _EVENT}
    error = {_JSON: {"schema": _of_struct(told.error, schemas)}}
    replies: Json = {
        str(status): {"description": said, "content": error}
        for status, said in _ERRORS.items()
    }
    replies["200"] = {"description": "Done", "content": content}
    replies |= {str(status): replies["200"] for status in told.also}
    operation["responses"] = dict(sorted(replies.items()))


def _of_body(model: type[BaseModel], schemas: Json) -> Json:
    prefix = f"{model.__name__}."
    schema = model.model_json_schema(ref_template=f"{_REFS}{prefix}{{model}}")
    parts: Json = schema.pop("$defs", {})
    schemas |= {prefix + name: part for name, part in parts.items()}
    schemas[model.__name__] = schema
    return {"$ref": _REFS + model.__name__}


def _of_struct(reply: type[msgspec.Struct], schemas: Json) -> Json:
    prefix = f"{reply.__module__.split('.api.')[-1]}."
    (shown,), parts = msgspec.json.schema_components(
        [reply], ref_template=f"{_REFS}{prefix}{{name}}"
    )
    schemas |= {prefix + name: part for name, part in parts.items()}
    return shown


def _wishes() -> Iterator[Json]:
    milliseconds = {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_MS}
    named: Sequence[tuple[str, Json, str]] = (
        (TTFT_HEADER, milliseconds, "Target of the time to the first token"),
        (TBT_HEADER, milliseconds, "Target of the time between two tokens"),
        (PRIORITY_HEADER, {"type": "integer"}, "Larger goes first"),
        (DEBUG_HEADER, {"enum": ["0", "1"]}, "1: say how the answer was made"),
        (PROGRESS_HEADER, {"enum": ["0", "1"]}, "1: comments say how far a prompt is"),
    )
    for name, schema, said in named:
        yield {
            "name": name,
            "in": "header",
            "required": False,
            "schema": schema,
            "description": said,
        }
