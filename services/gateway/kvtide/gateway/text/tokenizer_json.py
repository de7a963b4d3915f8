"""What we read of a ``tokenizer.json`` and the files beside it, typed."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from kvtide.gateway.errors import ModelTextError


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in text before the model's own tokenisation."""

    id: int
    content: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The part of a ``tokenizer.json`` that we look into."""

    added_tokens: list[AddedToken] = field(default_factory=list[AddedToken])
    decoder: dict[str, Any] | None = None

    @classmethod
    def parse(cls, serialised: str) -> Self:
        """Read a serialised tokenizer."""
        return msgspec.json.decode(serialised, type=cls)

    @property
    def decoder_steps(self) -> list[dict[str, Any]]:
        """The decoder as a flat list of steps.

        Raises:
            ModelTextError: there is none.
        """
        if self.decoder is None:
            raise ModelTextError("the tokenizer has no decoder, so tokens have no text")
        if self.decoder["type"] == "Sequence":
            return list(self.decoder["decoders"])
        return [self.decoder]


def without_added(serialised: str, contents: frozenset[str]) -> str:
    """The same tokenizer that sees nothing special in ``contents``."""
    tokenizer: dict[str, Any] = json.loads(serialised)
    added: list[dict[str, Any]] = tokenizer.get("added_tokens") or []
    tokenizer["added_tokens"] = [t for t in added if t["content"] not in contents]
    return json.dumps(tokenizer, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The part of ``tokenizer_config.json`` (and its neighbours) that we use.

    ``special`` maps names that templates know (``bos_token`` …) to their text.
    ``template`` is the chat template's source, None if the model has none.
    """

    special: dict[str, str]
    template: str | None
    add_bos: bool | None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what ``folder`` has; nothing is required.

        Raises:
            ModelTextError: a file is there but is not what it should be.
        """
        raw = _read_object(folder / "tokenizer_config.json")
        names = _read_object(folder / "special_tokens_map.json") | raw
        special = {
            name: text
            for name, value in names.items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        template_file = folder / "chat_template.jinja"
        template = (
            template_file.read_text("utf-8")
            if template_file.is_file()
            else _default_template(raw.get("chat_template"))
        )
        add_bos = raw.get("add_bos_token")
        return cls(special, template, add_bos if isinstance(add_bos, bool) else None)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelTextError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelTextError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", value)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("content")
    return value if isinstance(value, str) else None


def _default_template(value: object) -> str | None:
    """A template is a string, or a list of named ones of which we take ``default``."""
    if isinstance(value, list):
        named = {t["name"]: t["template"] for t in cast("list[dict[str, str]]", value)}
        return named.get("default")
    return value if isinstance(value, str) else None
