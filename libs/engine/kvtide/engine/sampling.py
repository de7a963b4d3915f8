"""What a request asks of sampling, and its random numbers; pure.

A random number depends on (seed, choice, position) alone, so that a token is the same
whatever the batch, the worker, or the attempt that draws it.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Final

from kvtide.engine.errors import InvalidSampling
from kvtide.engine.grammar import Grammar

MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 100.0

_U64 = (1 << 64) - 1
_LEAST_TEMPERATURE = 1e-5
_PERSON = b"kvtide.draw.1"
_MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token from logits.

    Logits are changed in this order: grammar, logit_bias, repetition_penalty,
    frequency_penalty, presence_penalty. Filters follow in this order, each on what the
    former left, renormalised: temperature, top_k, top_p, min_p.

    Attributes:
        temperature: below 1e-5, and so at 0, the largest logit is taken.
        top_p: keeps the smallest set of likeliest tokens with at least this mass.
        top_k: keeps this many likeliest tokens (and those equal to the last); 0: all.
        min_p: keeps tokens at least this fraction as likely as the likeliest.
        seed: any integer; taken modulo 2**64.
        choice: which of a request's parallel answers this is.
        repetition_penalty: divides positive logits, and multiplies negative ones, of
            tokens that the prompt or the answer has.
        presence_penalty: taken from the logits of tokens that the answer has.
        frequency_penalty: the same, once for each time.
        logit_bias: pairs of a token id and what is added to its logit.
        logprobs: how many likeliest tokens to report at each position beside the one
            that was drawn; None reports nothing.
        grammar: what the whole answer must be.

    Raises:
        InvalidSampling: a number is out of its range.
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
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidSampling("temperature", self.temperature, "0 or more")
        if not 0 < self.top_p <= 1:
            raise InvalidSampling("top_p", self.top_p, "above 0 and at most 1")
        if self.top_k < 0:
            raise InvalidSampling("top_k", self.top_k, "0 (off) or more")
        if not 0 <= self.min_p <= 1:
            raise InvalidSampling("min_p", self.min_p, "between 0 and 1")
        if self.choice < 0:
            raise InvalidSampling("choice", self.choice, "0 or more")
        self._check_changes()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            allowed = f"between 0 and {MAX_LOGPROBS}"
            raise InvalidSampling("logprobs", self.logprobs, allowed)

    def _check_changes(self) -> None:
        factor = self.repetition_penalty
        if not 0 < factor <= _MAX_PENALTY:
            allowed = f"above 0 and at most {_MAX_PENALTY:g}"
            raise InvalidSampling("repetition_penalty", factor, allowed)
        for field, value in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            if not abs(value) <= _MAX_PENALTY:
                allowed = f"between -{_MAX_PENALTY:g} and {_MAX_PENALTY:g}"
                raise InvalidSampling(field, value, allowed)
        for token, value in self.logit_bias:
            if not (token >= 0 and abs(value) <= MAX_LOGIT_BIAS):
                allowed = f"between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}"
                raise InvalidSampling(f"logit_bias[{token}]", value, allowed)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is simply taken."""
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether a draw depends on which tokens there are already."""
        off = (1.0, 0.0, 0.0)
        mine = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return mine != off


def uniform(seed: int, choice: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits, made from its arguments alone.

    The first 53 bits of BLAKE2b over the three numbers as little-endian 64-bit words.
    """
    counter = struct.pack("<QQQ", seed & _U64, choice & _U64, position & _U64)
    digest = hashlib.blake2b(counter, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
