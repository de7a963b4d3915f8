"""Splits what a model thinks from what it says, where its template marks that."""

from dataclasses import dataclass
from enum import Enum, auto

from kvtide.gateway.reading.overlap import overlap

THINK_START = "<think>"
THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class Thinking:
    """A model that thinks; ``begun``: its prompt ends within the reasoning."""

    begun: bool = False


class _State(Enum):
    START = auto()
    LEAD = auto()
    INSIDE = auto()
    AFTER = auto()
    OUTSIDE = auto()


class ReasoningSplit:
    """Takes text in pieces and gives (reasoning, content) of it.

    Only a first ``<think>`` counts. White space next to the tags belongs to neither.
    The joined results do not depend on how the text was cut.
    """

    def __init__(self, thinking: Thinking) -> None:
        """Before the first token."""
        self._state = _State.LEAD if thinking.begun else _State.START
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning is open."""
        return self._state in (_State.LEAD, _State.INSIDE)

    def push(self, text: str) -> tuple[str, str]:
        """More text."""
        if self._state is _State.OUTSIDE:
            return "", text
        self._held += text
        if self._state is _State.START:
            self._start()
        reasoning = self._inside() if self.is_reasoning else ""
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.OUTSIDE
        return reasoning, self._outside()

    def finish(self) -> tuple[str, str]:
        """The end has come: what was held back."""
        held, self._held = self._held, ""
        match self._state:
            case _State.LEAD | _State.INSIDE:
                return held, ""
            case _State.AFTER:
                return "", ""
            case _State.START | _State.OUTSIDE:
                return "", held

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(THINK_START):
            self._held = text[len(THINK_START) :]
            self._state = _State.LEAD
        elif not THINK_START.startswith(text):
            self._state = _State.OUTSIDE

    def _inside(self) -> str:
        if self._state is _State.LEAD:
            self._held = self._held.lstrip()
            if not self._held:
                return ""
            self._state = _State.INSIDE
        before, tag, after = self._held.partition(THINK_END)
        if tag:
            self._held = after
            self._state = _State.AFTER
            return before.rstrip()
        certain = self._held[: len(self._held) - overlap(self._held, THINK_END)]
        certain = certain.rstrip()
        self._held = self._held[len(certain) :]
        return certain

    def _outside(self) -> str:
        if self._state is not _State.OUTSIDE:
            return ""
        content, self._held = self._held, ""
        return content
