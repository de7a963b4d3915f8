"""What readers of tool calls share: the seam, and where a JSON object ends."""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, cast

from kvtide.gateway.reading.parts import Arguments, CallBegun, Part


class CallFormat(StrEnum):
    """How a model writes its calls: as its chat template taught it."""

    HERMES = "hermes"
    LLAMA = "llama"


class CallReader(Protocol):
    """Takes content in pieces and finds the calls in it.

    The joined parts do not depend on how the text was cut.
    """

    def push(self, text: str) -> list[Part]:
        """What is certain after more text."""
        ...

    def finish(self) -> list[Part]:
        """The end has come: what was held back."""
        ...


class ObjectSpan:
    """Follows one JSON object through text in pieces, to its closing brace."""

    def __init__(self) -> None:
        """Before the opening brace."""
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Where the object ends in this piece (behind its brace); None: not in it."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def split(self, text: str) -> tuple[str, str, bool]:
        """The object's part of this piece, what follows it, and whether it has ended."""
        end = self.end(text)
        return (text, "", False) if end is None else (text[:end], text[end:], True)


def calls_in(text: str, first: int) -> list[Part] | None:
    """A whole call, or a list of them, as JSON with its keys in any order.

    ``first`` numbers them. None: it is no such thing.
    """
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    found = [_call(item) for item in items]
    if not found or None in found:
        return None
    return list(_parts([one for one in found if one is not None], first))


def _parts(found: Sequence[tuple[str, str]], first: int) -> Iterator[Part]:
    for number, (name, arguments) in enumerate(found, first):
        yield CallBegun(number, name)
        yield Arguments(number, arguments)


def _call(item: object) -> tuple[str, str] | None:
    if not isinstance(item, Mapping):
        return None
    call = cast("Mapping[str, Any]", item)
    name = call.get("name")
    arguments: object = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):  # some write the JSON as a string
        return name, arguments
    return name, json.dumps(arguments or {}, ensure_ascii=False)
