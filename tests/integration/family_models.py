# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Small random models of each family that is served."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}


@dataclass(frozen=True)
class Variant:
    name: str
    model: type[PreTrainedModel]
    config: Any
    fp16_exact: bool = False


def _variants() -> Iterator[Variant]:
    yield Variant("llama", LlamaForCausalLM, LlamaConfig(**SHAPE))
    yield Variant("llama-fp16", LlamaForCausalLM, LlamaConfig(**SHAPE), fp16_exact=True)
    biased: dict[str, Any] = {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    }
    yield Variant("llama-biased", LlamaForCausalLM, LlamaConfig(**SHAPE, **biased))
    for name, rope in (("llama3", LLAMA3), ("linear", LINEAR)):
        yield Variant(
            f"llama-{name}",
            LlamaForCausalLM,
            LlamaConfig(**SHAPE, rope_parameters=rope),
        )
    mistral = MistralConfig(**SHAPE, head_dim=16, sliding_window=None)
    yield Variant("mistral", MistralForCausalLM, mistral)
    yield Variant("qwen2", Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    yield Variant("qwen2-fp16", Qwen2ForCausalLM, Qwen2Config(**SHAPE), fp16_exact=True)
    yield Variant("qwen3", Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16))
    tied = Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)
    yield Variant("qwen3-tied", Qwen3ForCausalLM, tied, fp16_exact=True)


VARIANTS = list(_variants())


def make_model(variant: Variant, folder: Path) -> None:
    """Save it there; always the same weights."""
    torch.manual_seed(0)
    model = variant.model(variant.config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                # transformers starts these at 0 and 1, which would hide mistakes
                weight.add_(0.3 * torch.randn_like(weight))
            if variant.fp16_exact:
                weight.copy_(weight.half())
    model.save_pretrained(folder)
