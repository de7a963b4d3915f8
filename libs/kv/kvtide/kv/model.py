"""What the rest of the system knows of a model: numbers and digests, no weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a served model that decide whether two KV blocks are the same.

    Workers compute it when they load the model and publish it in their beats;
    gateways derive block keys from it. ``digest`` is hex over configuration and
    weights. ``kv_dtype`` is a name such as ``float32``. ``numerics`` is a short
    canonical string (compute dtype, weight form, attention variant, RoPE settings,
    engine). ``max_tokens`` is the context length: prompt plus generated.
    """

    name: str
    digest: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    vocab_size: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    numerics: str
    layout_version: int = 1
    block_tokens: int = 64
