"""From logits to the distributions that tokens are drawn from, in batches."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from kvtide.engine.sampling import SamplingParams

# ids whose weights are summed before it is known in which of them a number falls
_RUN = 256

# weight from which on a token is likely
_LIKELY = 1e-3

# how far a row's float32 weights may sum up beside 1
_ROUNDING = 1e-5


def inverted(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """For each row of weights [batch, vocab] the token at its number in [0, 1).

    The distribution over ids in their natural order is inverted: first among the sums
    of runs of ids, then within one run. The sums, of non-negative float32 numbers, are
    off by less than 1e-6 of the whole, and the same whatever is in the batch.
    """
    runs = pad(weights, (0, -weights.shape[-1] % _RUN)).unflatten(-1, (-1, _RUN))
    run_edges = runs.sum(-1).cumsum(-1, dtype=torch.float64)
    target = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None]
    target = _below(target * run_edges[:, -1:], run_edges[:, -1:])
    run = torch.searchsorted(run_edges, target, right=True)
    before = run_edges.gather(1, (run - 1).clamp_(min=0)).masked_fill_(run == 0, 0.0)
    rows = torch.arange(len(run), device=weights.device)
    edges = runs[rows, run[:, 0]].cumsum(-1, dtype=torch.float64)
    target = _below(target - before, edges[:, -1:])
    inside = torch.searchsorted(edges, target, right=True)
    return (run * _RUN + inside)[:, 0].tolist()


def _below(target: Tensor, edge: Tensor) -> Tensor:
    """Rounding must not push a target onto the last edge, behind which is no token."""
    return torch.minimum(target, torch.nextafter(edge, torch.zeros_like(edge)))


def weights_of(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Weights float32 [batch, vocab] after temperature, top_k, top_p and min_p.

    They are probabilities up to a factor: the last two filters don't renormalise. Each
    row's are the same bits whatever is in the batch.
    """
    temperature = _column([one.temperature for one in params], logits)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature)
    _keep_top_k(scaled, params)
    weights = torch.softmax(scaled, -1)
    least = _nucleus_edges(weights, params)
    if any(one.min_p > 0 for one in params):
        share = _column([one.min_p for one in params], logits)
        floor = share * weights.amax(-1, keepdim=True)
        least = floor if least is None else torch.maximum(least, floor)
    if least is None:
        return weights
    return weights.masked_fill_(weights < least, 0.0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _keep_top_k(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Each row by itself: one that keeps many must not make others slow."""
    vocab = scaled.shape[-1]
    if not any(0 < one.top_k < vocab for one in params):
        return
    edges = [
        # selecting is linear in the vocabulary, where sorting the kept is not
        float(np.partition(row, -one.top_k)[-one.top_k])
        if 0 < one.top_k < vocab
        else float("-inf")
        for row, one in zip(scaled.cpu().numpy(), params, strict=True)
    ]
    scaled.masked_fill_(scaled < _column(edges, scaled), float("-inf"))


def _nucleus_edges(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """For each row the least weight in its nucleus, [batch, 1]; 0 where all stay."""
    if all(one.top_p >= 1 for one in params):
        return None
    edges = [
        _nucleus_edge(row, one.top_p) if one.top_p < 1 else 0.0
        for row, one in zip(weights.cpu().numpy(), params, strict=True)
    ]
    return _column(edges, weights)


def _nucleus_edge(weights: NDArray[np.float32], top_p: float) -> float:
    """The least weight in the smallest set of likeliest tokens with mass top_p."""
    likely = weights[weights >= _LIKELY]
    outside = 0.5 * (1.0 - top_p)
    if likely.sum(dtype=np.float64) >= top_p:
        weights = likely  # mostly: few tokens, and the nucleus is among them
    elif outside > _ROUNDING:
        # all tokens below this together have less mass than what stays outside
        weights = weights[weights >= outside / len(weights)]
    falling = np.sort(weights)[::-1]
    likelier_mass = np.cumsum(falling, dtype=np.float64) - falling
    return float(falling[np.searchsorted(likelier_mass, top_p) - 1])
