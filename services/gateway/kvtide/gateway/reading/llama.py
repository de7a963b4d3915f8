"""Calls as Llama 3 writes them: bare JSON objects, with semicolons between them."""

import re
from collections.abc import Iterable
from enum import Enum, auto

from kvtide.gateway.reading.calls import ObjectSpan
from kvtide.gateway.reading.parts import Arguments, CallBegun, Content, Part

PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s+")
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"\w+"\s*:\s*(?=\S)')


class _State(Enum):
    START = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    TEXT = auto()


class LlamaCalls:
    """See ``CallReader``.

    A call has no mark of its own, so only an object that names one of ``tools`` is one;
    as soon as text can't become that it is content.
    """

    def __init__(self, tools: Iterable[str]) -> None:
        """Before the first token."""
        self._heads = tuple(
            f'{{"name":"{name}","{key}":{{'
            for name in tools
            for key in ("parameters", "arguments")
        )
        self._state = _State.START
        self._held: str = ""
        self._calls = 0
        self._span = ObjectSpan()

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
        if self._state is not _State.START or (self._calls and not held.strip("; \n")):
            return []
        return [Content(held)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _State.START:
                return self._start(parts)
            case _State.ARGUMENTS:
                return self._arguments(parts)
            case _State.TAIL:
                return self._tail()
            case _State.TEXT:
                if self._held:
                    parts.append(Content(self._held))
                self._held = ""
                return False

    def _start(self, parts: list[Part]) -> bool:
        text = self._held.lstrip("; \t\r\n") if self._calls else self._held.lstrip()
        if text.startswith(PYTHON_TAG):
            self._held = text[len(PYTHON_TAG) :]
            return True
        if PYTHON_TAG.startswith(text):
            return False
        bare = _SPACE.sub("", text)
        if any(bare.startswith(head) for head in self._heads):
            head = _HEAD.match(text)
            if head is not None:
                parts.append(CallBegun(self._calls, head[1]))
                self._held = text[head.end() :]
                self._span = ObjectSpan()
                self._state = _State.ARGUMENTS
                return True
        elif any(head.startswith(bare) for head in self._heads):
            return False
        if self._calls:
            self._held = text
        self._state = _State.TEXT
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
        """The brace that closes the call, whatever came before it."""
        _, brace, after = self._held.partition("}")
        if not brace:
            return False
        self._held = after
        self._state = _State.START
        return True
