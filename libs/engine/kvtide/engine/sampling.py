"""What a request asks of sampling, and its random numbers; pure.

A random number depends on (seed, choice, position) alone, so that a token is the same
whatever the batch, the worker, or the attempt that draws it.
"""

import hashlib
import math
import struct
from dataclasses import dataclass

from kvtide.engine.errors import InvalidSampling

_U64 = (1 << 64) - 1
_LEAST_TEMPERATURE = 1e-5
_PERSON = b"kvtide.draw.1"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token from logits.

    Filters apply in this order, each on what the former left, renormalised:
    temperature, top_k, top_p, min_p.

    Attributes:
        temperature: below 1e-5, and so at 0, the largest logit is taken.
        top_p: keeps the smallest set of likeliest tokens with at least this mass.
        top_k: keeps this many likeliest tokens (and those equal to the last); 0: all.
        min_p: keeps tokens at least this fraction as likely as the likeliest.
        seed: any integer; taken modulo 2**64.
        choice: which of a request's parallel answers this is.

    Raises:
        InvalidSampling: a number is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0

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

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is simply taken."""
        return self.temperature < _LEAST_TEMPERATURE


def uniform(seed: int, choice: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits, made from its arguments alone.

    The first 53 bits of BLAKE2b over the three numbers as little-endian 64-bit words.
    """
    counter = struct.pack("<QQQ", seed & _U64, choice & _U64, position & _U64)
    digest = hashlib.blake2b(counter, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
