"""Which tokens a sequence has, as penalties ask it; imports no torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 256


class TokenHistory:
    """The distinct tokens of a prompt and its answer, and how often the answer has each.

    Made from the prompt's and the answer's tokens alone, wherever the answer goes on.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """``prompt`` is what the client sent, without what was generated since."""
        self._slots: dict[int, int] = {}
        self._ids: NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, np.int64)
        self._counts: NDArray[np.float32] = np.zeros(_FIRST_CAPACITY, np.float32)
        self._answer: list[int] = []
        for token in prompt:
            self._slot(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Every token that there is, once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often the answer has each of ``ids``."""
        return self._counts[: len(self._slots)]

    def follow(self, answer: Sequence[int]) -> None:
        """The answer has these tokens now; usually one more than before."""
        known = len(self._answer)
        if len(answer) < known:  # it went back: a row was computed again
            self._counts[:] = 0
            self._answer = []
            known = 0
        for token in answer[known:]:
            self._counts[self._slot(token)] += 1
            self._answer.append(token)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                empty = np.zeros_like(self._counts)
                self._counts = np.concatenate((self._counts, empty))
            self._ids[slot] = token
        return slot
