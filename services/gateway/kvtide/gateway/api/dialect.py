"""How answers look over HTTP: the seam between what is said and each API's words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtide.gateway.api.answers import Answers, Choice, Said
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.api.replies import Insight
from kvtide.gateway.api.token_report import ReportedToken

UNSET = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Frame:
    """What all pieces of one response share, and what the client wants to see."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    show_ids: bool = False
    show_logprobs: bool = False
    show_insight: bool = False
    show_progress: bool = False

    def tokens(
        self, choice: Choice, start: int, end: int
    ) -> Sequence[ReportedToken] | None:
        """The tokens start..end of an answer, if they were asked for."""
        return choice.report.tokens[start:end] if self.show_logprobs else None

    def insight(self, choice: Choice) -> Insight | msgspec.UnsetType:
        """How an answer was made, if that was asked for."""
        return choice.insight if self.show_insight else UNSET


class Dialect(Protocol):
    """One API's form. ``whole`` makes a JSON body, the rest make events of a stream.

    A stream is opening, pieces and endings of all answers, closing; or a failure
    instead of what is left. An empty result is not sent.
    """

    frame: Frame

    def opening(self, answers: Answers) -> bytes:
        """What comes before the first token."""
        ...

    def piece(self, said: Said) -> bytes:
        """More of an answer."""
        ...

    def ending(self, choice: Choice) -> bytes:
        """An answer is finished; all of it was told."""
        ...

    def closing(self, answers: Answers) -> bytes:
        """All answers are finished."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The answers end here, by an error."""
        ...

    def whole(self, answers: Answers) -> bytes:
        """The body of a response that is not streamed."""
        ...


def data_event(body: bytes) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + body + b"\n\n"


def named_event(name: str, reply: msgspec.Struct) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(msgspec.json.encode(reply))
