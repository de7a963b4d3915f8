"""Control tokens that users type are text.

A template writes ``<|im_end|>`` and means the token; a user who types it means ten
characters. Before rendering, every control token inside a message is wrapped in two
characters that the messages do not contain; after rendering, what is wrapped is
encoded as text and all the rest as the template's author meant it.

The chat is cut only where a user typed a control token: any other chat is encoded
whole, exactly as the model's own library would.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvtide.gateway.text.chat import ChatMessage

_MARKERS = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xF0100))
"""Noncharacters first, which no text should hold, then private use."""

_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rendered chat; ``typed`` is a control token that a user typed."""

    text: str
    typed: bool


@dataclass(frozen=True, slots=True)
class MarkedChat:
    """Messages with typed control tokens wrapped, and how to find them again."""

    messages: list[dict[str, Any]]
    _pieces: re.Pattern[str]

    def split(self, rendered: str) -> list[Piece]:
        """The rendered chat in pieces, without markers.

        A template may cut a wrapped token apart: one marker is enough to know it, and
        a lone one still keeps the text on its two sides from joining into a token.
        """
        pieces: list[Piece] = []
        end = 0
        for match in self._pieces.finditer(rendered):
            pieces.append(Piece(rendered[end : match.start()], typed=False))
            pieces.append(Piece(match[1] or match[2] or "", typed=True))
            end = match.end()
        pieces.append(Piece(rendered[end:], typed=False))
        return [piece for piece in pieces if piece.text]


class ControlTokens:
    """The control tokens of one model.

    ``special`` are never text. ``written`` are other added tokens that the template
    itself writes (such as ``<tool_call>``): an assistant's message may hold them, as
    the model made them, anyone else's may not.
    """

    def __init__(self, special: Iterable[str], written: Iterable[str]) -> None:
        """Compile both patterns."""
        names = frozenset(special)
        self.all = names | frozenset(written)
        self._special = _pattern(names)
        self._any = _pattern(self.all)

    def cut(self, text: str) -> list[str]:
        """``text`` in parts of which none holds a control token: each is cut in two."""
        parts: list[str] = []
        end = 0
        for match in self._any.finditer(text):
            parts.append(text[end : match.start() + 1])
            end = match.start() + 1
        parts.append(text[end:])
        return parts

    def mark(self, messages: Sequence[ChatMessage]) -> MarkedChat | None:
        """Wrap what users typed; None if they typed no control token."""
        if not any(self._typed(message) for message in messages):
            return None
        used = set("".join(text for m in messages for text in _strings(m)))
        free = (chr(code) for code in _MARKERS if chr(code) not in used)
        opening, closing = next(free), next(free)
        marked = [
            {
                key: _wrap(value, self._of(message), opening, closing)
                for key, value in message.items()
            }
            for message in messages
        ]
        token = f"({self._any.pattern})"
        pieces = f"{opening}{token}{closing}?|{token}{closing}|[{opening}{closing}]"
        return MarkedChat(marked, re.compile(pieces))

    def _of(self, message: ChatMessage) -> re.Pattern[str]:
        return self._special if message.get("role") == "assistant" else self._any

    def _typed(self, message: ChatMessage) -> bool:
        pattern = self._of(message)
        return any(pattern.search(text) for text in _strings(message))


def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    if not longest_first:
        return _NEVER
    return re.compile("|".join(map(re.escape, longest_first)))


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[object]", value):
            yield from _strings(item)


def _wrap(value: object, pattern: re.Pattern[str], opening: str, closing: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: f"{opening}{match[0]}{closing}", value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return {
            _wrap(key, pattern, opening, closing): _wrap(
                item, pattern, opening, closing
            )
            for key, item in items
        }
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        return [_wrap(item, pattern, opening, closing) for item in items]
    return value
