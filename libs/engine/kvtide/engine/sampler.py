"""Choosing tokens from logits, in batches."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.engine.errors import NonFiniteLogits
from kvtide.engine.sampling import SamplingParams, uniform


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
        drawn = [i for i, wanted in enumerate(params) if not wanted.greedy]
        if drawn:
            chosen = _draw(
                rows[drawn],
                [params[i] for i in drawn],
                [positions[i] for i in drawn],
            )
            for i, token in zip(drawn, chosen, strict=True):
                tokens[i] = token
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


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities float64 [vocab] after temperature, top_k, top_p and min_p."""
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / params.temperature
    if 0 < params.top_k < len(scaled):
        smallest = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    probabilities = torch.softmax(scaled, -1)
    if params.top_p < 1:
        probabilities = _nucleus(probabilities, params.top_p)
    if params.min_p > 0:
        least = params.min_p * probabilities.max()
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    return probabilities


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose mass reaches top_p."""
    count = 256
    while True:  # most nuclei are small: a full sort is rarely needed
        count = min(count, len(probabilities))
        values, ids = probabilities.topk(count)
        before = values.cumsum(-1) - values
        if count == len(probabilities) or float(before[-1]) >= top_p:
            break
        count *= 16
    kept = ids[before < top_p * float(probabilities.sum())]
    return torch.zeros_like(probabilities).index_copy_(0, kept, probabilities[kept])


def _draw(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    probabilities = torch.stack(
        [filtered(row, wanted) for row, wanted in zip(logits, params, strict=True)]
    )
    edges = probabilities.cumsum(-1)
    numbers = torch.tensor(
        [
            uniform(wanted.seed, wanted.choice, position)
            for wanted, position in zip(params, positions, strict=True)
        ],
        dtype=torch.float64,
    )
    targets = numbers[:, None] * edges[:, -1:]
    # rounding must not push a target onto the last edge, behind which is no token
    below = torch.nextafter(edges[:, -1:], torch.zeros_like(edges[:, -1:]))
    found = torch.searchsorted(edges, torch.minimum(targets, below), right=True)
    tokens: list[int] = found[:, 0].tolist()
    return tokens


def _rows(logits: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(logits, Tensor):
        return logits
    return torch.stack(list(logits)) if logits else torch.empty(0, 0)


def _refuse_non_finite(rows: Tensor) -> None:
    finite = torch.isfinite(rows.amax(-1))
    if not bool(finite.all()):
        raise NonFiniteLogits(int(finite.logical_not().nonzero()[0]))
