"""Choosing tokens from logits, in batches."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.engine.errors import NonFiniteLogits
from kvtide.engine.sampling import SamplingParams, uniform
from kvtide.engine.threads import one_thread

Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, before temperature and filters.

    `top_ids` and `top_logprobs` are the likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Sampler:
    """Draws tokens; stateless, so any worker draws the same.

    A token is found by inverting the distribution over token ids with the uniform
    number of (seed, choice, position). Ids are in their natural order, so noise in the
    logits moves a token only where the number lies at an edge of the distribution.
    """

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor | Sequence[Tensor],
        params: Sequence[SamplingParams],
        positions: Sequence[int],
    ) -> list[int]:
        """Draw one token for each row of logits [batch, vocab].

        `positions[i]` is the index that row i's new token gets in its whole sequence,
        prompt and generated tokens together.

        Raises:
            NonFiniteLogits: a row holds NaN or infinity, or nothing but -infinity.
            ValueError: the three lengths differ.
        """
        rows = _rows(logits)
        if not len(rows) == len(params) == len(positions):
            message = f"{len(rows)} rows, {len(params)} params, {len(positions)} places"
            raise ValueError(message)
        if not len(rows):
            return []
        _refuse_non_finite(rows)
        tokens: list[int] = rows.argmax(-1).tolist()
        with one_thread():
            for i, wanted in enumerate(params):
                if not wanted.greedy:
                    tokens[i] = _draw(rows[i], wanted, positions[i])
        return tokens

    @torch.inference_mode()
    def logprobs(
        self, logits: Tensor | Sequence[Tensor], tokens: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of chosen tokens and of the `top` likeliest of each row."""
        rows = _rows(logits)
        every = torch.log_softmax(rows, -1)
        values, ids = every.topk(top, -1)
        return [
            TokenLogprobs(
                token_id=token,
                logprob=float(every[i, token]),
                top_ids=tuple(ids[i].tolist()),
                top_logprobs=tuple(values[i].tolist()),
            )
            for i, token in enumerate(tokens)
        ]


def filtered(logits: Tensor, params: SamplingParams) -> Weights:
    """Weights float32 [vocab] after temperature, top_k, top_p and min_p.

    They are probabilities up to a factor: the last two filters don't renormalise.
    """
    scaled = (logits - logits.max()) / params.temperature
    if 0 < params.top_k < len(scaled):
        smallest = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    weights: Weights = torch.softmax(scaled, -1).numpy()
    if params.top_p < 1:
        weights = np.where(weights >= _nucleus_edge(weights, params.top_p), weights, 0)
    if params.min_p > 0:
        weights = np.where(weights >= params.min_p * weights.max(), weights, 0)
    return weights


def _nucleus_edge(weights: Weights, top_p: float) -> np.float32:
    """The least weight in the smallest set of likeliest tokens with mass top_p."""
    falling = np.sort(weights)[::-1]
    likelier_mass = np.cumsum(falling, dtype=np.float64) - falling
    return falling[np.searchsorted(likelier_mass, top_p) - 1]


def _draw(logits: Tensor, params: SamplingParams, position: int) -> int:
    """Invert the distribution over token ids at the position's uniform number."""
    edges = np.cumsum(filtered(logits, params), dtype=np.float64)
    target = uniform(params.seed, params.choice, position) * edges[-1]
    # rounding must not push it onto the last edge, behind which is no token
    target = min(target, np.nextafter(edges[-1], 0.0))
    return int(np.searchsorted(edges, target, side="right"))


def _rows(logits: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(logits, Tensor):
        return logits
    return torch.stack(list(logits)) if logits else torch.empty(0, 0)


def _refuse_non_finite(rows: Tensor) -> None:
    finite = torch.isfinite(rows.amax(-1))
    if not bool(finite.all()):
        raise NonFiniteLogits(int(finite.logical_not().nonzero()[0]))
