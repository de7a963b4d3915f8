"""Reading a request's body within its limits, and into types."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from kvtide.gateway.api.problems import ApiError, bad_param

READ_LIMIT_S = 60.0
LOC_FIELDS = frozenset(
    (
        *("content", "role", "text", "type", "include_usage", "name", "json_schema"),
        *("schema", "json", "regex", "grammar", "choice", "json_object"),
        *("structural_tag", "function", "parameters", "description", "strict", "id"),
        *("tool_calls", "tool_call_id", "arguments", "input_schema", "input"),
        *("tool_use_id", "is_error", "call_id", "output", "format", "thinking"),
        *("budget_tokens", "disable_parallel_tool_use", "summary", "user_id"),
        *("image_url", "url", "source", "media_type", "data"),
    )
)
TAGGED_FIELDS = frozenset(("response_format",))

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most ``limit`` bytes of it kept.

    Raises:
        ApiError: 413 (by its declared length, before anything is read, or as soon as
            it grows past the limit), 400 (a bad length), 408 (too slow).
        ClientDisconnect: the client went away.
    """
    declared = request.headers.get("content-length")
    if declared is not None:
        if not (declared.isascii() and declared.isdigit()):
            raise ApiError(400, "Content-Length is not a number")
        if len(declared) > len(str(limit)) or int(declared) > limit:
            raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_LIMIT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError as error:
        raise ApiError(
            408, f"the body did not arrive within {READ_LIMIT_S:.0f} s"
        ) from error
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {limit} bytes",
        code="request_too_large",
    )


def parse(model: type[Model], body: bytes) -> Model:
    """The body as ``model``.

    Raises:
        ApiError: 400; it names the field, or says what is wrong with the JSON.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _problem(error) from error


async def read(request: Request, model: type[Model], limit: int) -> Model:
    """Read and parse; see ``read_body`` and ``parse``."""
    try:
        body = await read_body(request, limit)
    except ClientDisconnect as error:
        raise ApiError(400, "the client went away") from error
    return parse(model, body)


def _problem(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return ApiError(400, found[0]["msg"], code="invalid_json")
    if not found[0]["loc"]:
        return ApiError(400, "the request body is not a JSON object")
    # a union reports each of its members: more than a wrong type says which was meant
    param = _param(found[0]["loc"])
    place = found[0]["loc"][0]
    alike = [e for e in found if e["loc"][0] == place]
    telling = [e for e in alike if not e["type"].endswith("_type")]
    if telling:
        param = _param(telling[0]["loc"])
        return bad_param(param, f"{param}: {telling[0]['msg']}")
    if len(alike) == 1:
        return bad_param(param, f"{param}: {found[0]['msg']}")
    param = _param(_shared([e["loc"] for e in alike]))
    return bad_param(param, f"{param}: the value is of none of the accepted types")


def _shared(places: list[tuple[int | str, ...]]) -> tuple[int | str, ...]:
    """How all of ``places`` begin."""
    first = places[0]
    for size in range(len(first), 1, -1):
        if all(place[:size] == first[:size] for place in places):
            return first[:size]
    return first[:1]


def _param(loc: tuple[int | str, ...]) -> str:
    """A place in the body, without the names that pydantic gives to union members."""
    param = str(loc[0])
    # what tells the kinds of such a field apart is no part of its name
    for part in loc[2:] if param in TAGGED_FIELDS else loc[1:]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part in LOC_FIELDS and not param.endswith(f"].{part}"):
            # the kind of a part is told apart by a word that may be a field's too
            param += f".{part}"
    return param
