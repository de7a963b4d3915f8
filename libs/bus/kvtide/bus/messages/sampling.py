"""How tokens are to be drawn, and what is told of a draw; parts of other messages."""

from enum import StrEnum

import msgspec


class GrammarLanguage(StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class GrammarSpec(msgspec.Struct, frozen=True):
    """What the whole answer must match; the gateway has checked it.

    A worker holds a later attempt to it from the answer's tokens alone.
    """

    language: GrammarLanguage
    source: str


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 is off.

    ``seed``, ``choice`` and the token's position decide the random number, so a token
    does not depend on the batch, the worker or a fail-over. ``choice`` is the number of
    the answer among those to one client's request, which share a seed.

    ``repetition_penalty`` looks at prompt and answer, the other two at the answer.
    ``logprobs``: how many likeliest tokens to report with each one; None: nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: GrammarSpec | None = None

    @property
    def depends(self) -> bool:
        """Whether a draw depends on more of the sequence than its position."""
        factors = (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        )
        return factors != (1.0, 0.0, 0.0) or self.grammar is not None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The model's own log-probabilities at one position, before anything changed them.

    ``logprob`` is that of the token that was drawn; ``top`` are the likeliest ids with
    theirs, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
