"""From logits to the distributions that tokens are drawn from, in batches."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtide.engine.sampling import SamplingParams

# a nucleus is nearly always among this many likeliest tokens; else all are sorted
_HEAD_TOKENS = 1024


def edges_of(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Cumulated weights over token ids, float64 [batch, vocab].

    A row's last entry is its whole weight, which is 1 only up to what filters took.
    """
    return weights_of(logits, params).cumsum(-1, dtype=torch.float64)


def weights_of(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Weights float32 [batch, vocab] after temperature, top_k, top_p and min_p.

    They are probabilities up to a factor: the last two filters don't renormalise. Each
    row's are the same bits whatever is in the batch.
    """
    temperature = _column([one.temperature for one in params], logits)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
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
    vocab = scaled.shape[-1]
    wanted = [one.top_k if 0 < one.top_k < vocab else 0 for one in params]
    most = max(wanted)
    if most == 0:
        return
    likeliest = scaled.topk(most, -1).values
    last = torch.tensor([max(k, 1) - 1 for k in wanted], device=scaled.device)
    smallest = likeliest.gather(1, last[:, None])
    unlimited = torch.tensor([k == 0 for k in wanted], device=scaled.device)
    smallest.masked_fill_(unlimited[:, None], float("-inf"))
    scaled.masked_fill_(scaled < smallest, float("-inf"))


def _nucleus_edges(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """For each row the least weight in its nucleus, [batch, 1]; 0 where all stay.

    The nucleus is the smallest set of likeliest tokens with mass top_p.
    """
    limited = [i for i, one in enumerate(params) if one.top_p < 1]
    if not limited:
        return None
    edges = weights.new_zeros(len(params), 1)
    some = weights if len(limited) == len(params) else weights[limited]
    mass = torch.tensor(
        [params[i].top_p for i in limited], dtype=torch.float64, device=weights.device
    )[:, None]
    head = min(_HEAD_TOKENS, weights.shape[-1])
    edge, found = _edge_in_head(some, mass, head)
    if not bool(found.all()):
        rest = found.logical_not().nonzero()[:, 0]
        edge[rest], _ = _edge_in_head(some[rest], mass[rest], weights.shape[-1])
    edges[limited] = edge
    return edges


def _edge_in_head(weights: Tensor, mass: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The edges, and whether the first `size` tokens were enough to find them."""
    falling = weights.topk(size, -1).values
    cumulated = falling.cumsum(-1, dtype=torch.float64)
    likelier = cumulated - falling
    inside = (likelier < mass).sum(-1, keepdim=True)
    found = (cumulated[:, -1:] >= mass) | (size == weights.shape[-1])
    return falling.gather(1, inside - 1), found[:, 0]
