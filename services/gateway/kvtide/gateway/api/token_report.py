"""The tokens of one answer as clients see them who ask for log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.bus.messages import TokenLogprobs
from kvtide.gateway.text import ModelText
from kvtide.gateway.text.detokenizer import Detokenizer

LEAST_LOGPROB = -9999.0
"""What OpenAI's API says for a token that is as good as impossible; JSON has no -inf."""


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token's text, its bytes, and its log-probability."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token of the answer; ``offset`` characters were complete before it."""

    token: NamedToken
    top: tuple[NamedToken, ...]
    offset: int


class TokenReport:
    """Grows with the answer: one entry for each token, whatever text is held back."""

    def __init__(self, text: ModelText) -> None:
        """Nothing is there yet."""
        self.tokens: list[ReportedToken] = []
        self._text = text
        self._detokenizer = Detokenizer(text.table)
        self._chars = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """More tokens, each with its log-probabilities."""
        for token, told in zip(ids, logprobs, strict=False):
            top = tuple(self._named(other, value) for other, value in told.top)
            own = self._named(token, told.logprob)
            self.tokens.append(ReportedToken(own, top, self._chars))
            self._chars += len(self._detokenizer.push(token))

    def _named(self, token: int, logprob: float) -> NamedToken:
        raw = self._text.table.of(token)
        if not raw:  # a special token has no text in an answer, but a name
            raw = (self._text.token_name(token) or "").encode()
        text = raw.decode("utf-8", "replace")
        return NamedToken(text, raw, max(logprob, LEAST_LOGPROB))
