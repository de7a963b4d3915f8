"""Messages as clients send them, turned into what chat templates expect."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.schemas import Message

MAX_VARIABLE_CHARS = 64
_RESERVED = frozenset(("messages", "add_generation_prompt"))


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """One dict a message: text parts joined, nothing that is null.

    Raises:
        ApiError: a message without content that needs it.
    """
    return [_template_message(i, message) for i, message in enumerate(messages)]


def _template_message(index: int, message: Message) -> dict[str, Any]:
    extra = {k: v for k, v in (message.model_extra or {}).items() if v is not None}
    content = message.content
    if content is None and message.role != "assistant":
        param = f"messages[{index}].content"
        raise bad_param(param, f"{param}: a {message.role} message needs content")
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    # templates know the role that OpenAI renamed by its old name
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content or "", **extra}
    if message.name is not None:
        made["name"] = message.name
    return made


def template_variables(
    given: Mapping[str, bool | int | float | str | None] | None,
) -> dict[str, object]:
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
