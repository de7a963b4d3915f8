"""Attention of new tokens over a sequence's own run."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

VARIANT = "sdpa-run"
"""Goes into the numerics of a model."""


def history_mask(start: int, end: int, dtype: torch.dtype) -> Tensor | None:
    """What queries at start..end may see of keys 0..end, added to the scores.

    None where no mask is needed: a single query sees everything, and without history
    plain causality is enough.
    """
    if start == 0 or end - start == 1:
        return None
    hidden = torch.full((end - start, end), float("-inf"), dtype=dtype)
    return hidden.triu_(start + 1)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Tensor
) -> None:
    """Attend with the last tokens of a sequence to all of it.

    query [n, heads, head_dim]; keys and values [end, kv_heads, head_dim], of which the
    last n belong to the queries; mask from `history_mask`; out [n, heads * head_dim].
    K and V are read in place.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    k = keys.transpose(0, 1).unsqueeze(0)
    v = values.transpose(0, 1).unsqueeze(0)
    if tokens == 1:
        # the heads that share a KV head become its queries: K is read once for all
        q = query.view(1, kv_heads, heads // kv_heads, head_dim)
        out.view(1, kv_heads, heads // kv_heads, head_dim).copy_(
            scaled_dot_product_attention(q, k, v)
        )
        return
    q = query.transpose(0, 1).unsqueeze(0)
    attended = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
    )
    out.view(tokens, heads, head_dim).copy_(attended[0].transpose(0, 1))
