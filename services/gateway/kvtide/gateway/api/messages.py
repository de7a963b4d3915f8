"""Messages as clients send them, turned into what chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvtide.gateway.api.pictures import PictureTray
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.schemas import ContentPart, Message, TextPart, Variables
from kvtide.gateway.text.chat import picture_part, text_part

MAX_VARIABLE_CHARS = 64
_RESERVED = frozenset(("messages", "add_generation_prompt", "tools"))
_THOUGHTS = "reasoning_content"


def template_messages(
    messages: Sequence[Message], tray: PictureTray
) -> list[dict[str, Any]]:
    """One dict a message: text parts joined, nothing that is null.

    Pictures go to ``tray``; a content that has some stays in parts.

    Raises:
        ApiError: a message without content that needs it, or a picture that is not taken.
    """
    return [_template_message(i, message, tray) for i, message in enumerate(messages)]


def assistant_message(
    content: str, calls: Sequence[Mapping[str, Any]] = (), reasoning: str = ""
) -> dict[str, Any]:
    """What the model said before, as templates take it."""
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        made["tool_calls"] = list(calls)
    if reasoning:
        made[_THOUGHTS] = reasoning
    return made


def template_call(name: str, arguments: object, call_id: str) -> dict[str, Any]:
    """A call that the model made before; templates take the arguments as an object."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool_message(call_id: str, content: str) -> dict[str, Any]:
    """What a call came back with."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def read_arguments(text: str) -> object:
    """Arguments as an object; as they are if they are none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, object]", value) if isinstance(value, dict) else text


def _template_message(
    index: int, message: Message, tray: PictureTray
) -> dict[str, Any]:
    extra = {k: v for k, v in (message.model_extra or {}).items() if v is not None}
    content = message.content
    if content is None and message.role != "assistant":
        param = f"messages[{index}].content"
        raise bad_param(param, f"{param}: a {message.role} message needs content")
    if isinstance(content, list):
        content = _parts(content, message.role, f"messages[{index}].content", tray)
    # templates know the role that OpenAI renamed by its old name
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content or "", **extra}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            template_call(
                call.function.name, read_arguments(call.function.arguments), call.id
            )
            for call in message.tool_calls
        ]
    return made


def _parts(
    parts: Sequence[ContentPart], role: str, param: str, tray: PictureTray
) -> str | list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        if isinstance(part, TextPart):
            made.append(text_part(part.text))
            continue
        place = f"{param}[{number}].image_url"
        if role != "user":
            raise bad_param(place, f"{place}: only a user message may hold pictures")
        tray.add(part.url, place)
        made.append(picture_part())
    return joined(made)


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A content of ``text_part``s and ``picture_part``s: text alone is one string."""
    texts = [part["text"] for part in parts if "text" in part]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def template_variables(given: Variables | None) -> dict[str, object]:
    """What ``chat_template_kwargs`` may hand to a template: switches, no text.

    Raises:
        ApiError: a reserved name, or a string that could carry control tokens.
    """
    param = "chat_template_kwargs"
    for name, value in (given or {}).items():
        if name in _RESERVED or name.endswith("_token"):
            raise bad_param(param, f"{param}: {name[:64]!r} can't be set")
        if isinstance(value, str) and not _is_plain(value):
            raise bad_param(
                param, f"{param}: {name[:64]!r} must be a short word, not text"
            )
    return dict(given or {})


def _is_plain(value: str) -> bool:
    return len(value) <= MAX_VARIABLE_CHARS and value.replace("_", "").isalnum()
