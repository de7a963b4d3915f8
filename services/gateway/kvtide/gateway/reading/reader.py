"""Reads one answer: first its reasoning apart, then calls in what is left."""

from collections.abc import Iterable

from kvtide.gateway.reading.calls import CallFormat, CallReader
from kvtide.gateway.reading.hermes import HermesCalls
from kvtide.gateway.reading.llama import LlamaCalls
from kvtide.gateway.reading.parts import Content, Part, Reasoning
from kvtide.gateway.reading.reasoning import ReasoningSplit, Thinking


class AnswerReader:
    """Text in pieces to parts; the joined parts do not depend on the cuts."""

    def __init__(self, split: ReasoningSplit | None, calls: CallReader | None) -> None:
        """Without both, all text is content."""
        self._split = split
        self._calls = calls

    def push(self, text: str) -> list[Part]:
        """What is certain after more text."""
        if not text:
            return []
        reasoning, content = (
            self._split.push(text) if self._split is not None else ("", text)
        )
        return self._read(reasoning, content)

    def finish(self) -> list[Part]:
        """The end has come: what was held back. Called once."""
        reasoning, content = (
            self._split.finish() if self._split is not None else ("", "")
        )
        parts = self._read(reasoning, content)
        return parts + self._calls.finish() if self._calls is not None else parts

    def _read(self, reasoning: str, content: str) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if not content:
            return parts
        if self._calls is None:
            return [*parts, Content(content)]
        return parts + self._calls.push(content)


def reader_of(
    thinking: Thinking | None, form: CallFormat | None, tools: Iterable[str]
) -> AnswerReader:
    """A reader for an answer that may think, and call ``tools`` in ``form``."""
    split = ReasoningSplit(thinking) if thinking is not None else None
    match form:
        case CallFormat.HERMES:
            return AnswerReader(split, HermesCalls())
        case CallFormat.LLAMA:
            return AnswerReader(split, LlamaCalls(tools))
        case None:
            return AnswerReader(split, None)
