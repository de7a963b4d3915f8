"""How long answers get, from those that ended. Pure, bounded, forgetting."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BINS = 96
_LONGEST = 1e6


class AnswerLengths:
    """A histogram of answer lengths in tokens, over bins that grow by a fixed ratio.

    Each answer fades with those that follow. Until something was seen, one answer of
    the length that is assumed stands in.
    """

    def __init__(self, assumed_tokens: float = 128.0, *, fade: float = 0.999) -> None:
        """``fade`` is what is left of an answer's weight when the next one ends."""
        self._edges = np.concatenate(([0.0], np.geomspace(1.0, _LONGEST, _BINS)))
        self._middles = (self._edges[1:] + self._edges[:-1]) / 2
        self._weights = np.zeros(_BINS)
        self._fade = fade
        self._assumed = assumed_tokens
        self._sum = assumed_tokens
        self._count = 1.0
        self._after: Floats | None = None
        self._add(assumed_tokens)

    def ended(self, tokens: float) -> None:
        """An answer of that many tokens is complete."""
        if not np.isfinite(tokens) or tokens < 0:
            return
        self._weights *= self._fade
        self._sum = self._sum * self._fade + tokens
        self._count = self._count * self._fade + 1
        self._add(tokens)

    @property
    def mean_tokens(self) -> float:
        """The mean length."""
        return self._sum / self._count

    def expected_tokens(self, limit_tokens: float) -> float:
        """The mean length of answers that are cut at ``limit_tokens``."""
        cut = np.minimum(self._middles, max(0.0, limit_tokens))
        return float((cut * self._weights).sum() / self._weights.sum())

    def surviving(self, tokens: Floats) -> Floats:
        """The share of answers that are longer than each of ``tokens``."""
        after = self._after
        if after is None:
            total = float(self._weights.sum())
            ended = np.concatenate(([0.0], np.cumsum(self._weights)))
            after = self._after = 1.0 - ended / total
        return np.interp(tokens, self._edges, after)

    def _add(self, tokens: float) -> None:
        at = int(np.searchsorted(self._edges, min(tokens, _LONGEST), side="left"))
        self._weights[min(max(at, 1), _BINS) - 1] += 1.0
        self._after = None
