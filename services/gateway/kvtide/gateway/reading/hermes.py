"""Calls as Hermes and Qwen write them: JSON between ``<tool_call>`` tags."""

import json
import re
from enum import Enum, auto

from kvtide.gateway.reading.calls import ObjectSpan, calls_in
from kvtide.gateway.reading.overlap import overlap
from kvtide.gateway.reading.parts import Arguments, CallBegun, Content, Part

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"

# the usual order of keys lets the arguments pass while they are written
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class HermesCalls:
    """See ``CallReader``. What is between tags and no call stays content.

    White space around a call belongs to nothing.
    """

    def __init__(self) -> None:
        """Before the first token."""
        self._state = _State.TEXT
        self._held = ""
        self._calls = 0
        self._span = ObjectSpan()
        self._after_call = False

    def push(self, text: str) -> list[Part]:
        """See ``CallReader.push``."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """See ``CallReader.finish``."""
        held, self._held = self._held, ""
        match self._state:
            case _State.TEXT:
                held = held.lstrip() if self._after_call else held
                return [Content(held)] if held else []
            case _State.HEAD:
                # an end token may have taken the place of the closing tag
                return calls_in(held, self._calls) or [Content(CALL_START + held)]
            case _State.ARGUMENTS | _State.TAIL:
                return []

    def _step(self, parts: list[Part]) -> bool:
        """Take what is certain; whether there may be more."""
        match self._state:
            case _State.TEXT:
                return self._text(parts)
            case _State.HEAD:
                return self._head(parts)
            case _State.ARGUMENTS:
                return self._arguments(parts)
            case _State.TAIL:
                return self._tail()

    def _text(self, parts: list[Part]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
        before, tag, after = self._held.partition(CALL_START)
        if tag:
            before = before.rstrip()
            self._held = after
            self._state = _State.HEAD
        else:
            before = self._held[: len(self._held) - overlap(self._held, CALL_START)]
            before = before.rstrip()
            self._held = self._held[len(before) :]
        if before:
            self._after_call = False
            parts.append(Content(before))
        return bool(tag)

    def _head(self, parts: list[Part]) -> bool:
        inside, tag, after = self._held.partition(CALL_END)
        head = _HEAD.match(inside)
        if head is not None:
            parts.append(CallBegun(self._calls, _unescaped(head[1])))
            self._held = self._held[head.end() :]
            self._span = ObjectSpan()
            self._state = _State.ARGUMENTS
            return True
        if not tag:
            return False
        found = calls_in(inside, self._calls)
        self._held = after
        self._state = _State.TEXT
        self._after_call = found is not None
        parts += found or [Content(CALL_START + inside + CALL_END)]
        self._calls += sum(isinstance(part, CallBegun) for part in found or ())
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        piece, self._held, ended = self._span.split(self._held)
        if piece:
            parts.append(Arguments(self._calls, piece))
        if not ended:
            return False
        self._calls += 1
        self._state = _State.TAIL
        return True

    def _tail(self) -> bool:
        _, tag, after = self._held.partition(CALL_END)
        if not tag:
            return False
        self._held = after
        self._state = _State.TEXT
        self._after_call = True
        return True


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name
