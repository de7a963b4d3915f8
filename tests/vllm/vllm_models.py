# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Small random models of other kinds than the demo model, with its tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.integration.random_models import begun, made
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

HEAD = 64
SHAPE: dict[str, Any] = {
    "hidden_size": 4 * HEAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": 4096,
}
WINDOW_TOKENS = 256
ADAPTER_SEED = 5
ADAPTER_RANK = 8
SLIDING, FULL = "sliding_attention", "full_attention"


def sliding_model(folder: Path, demo: Path) -> Path:
    """Gemma 3: four layers with a window and two that attend to all, so three groups."""
    config = Gemma3TextConfig(
        **begun(folder, demo),
        **SHAPE,
        intermediate_size=512,
        num_hidden_layers=6,
        query_pre_attn_scalar=HEAD,
        sliding_window=WINDOW_TOKENS,
        layer_types=[SLIDING, SLIDING, FULL] * 2,
    )
    return made(folder, Gemma3ForCausalLM, config)


def expert_model(folder: Path, demo: Path) -> Path:
    """Mixtral: of eight experts each token has two."""
    config = MixtralConfig(
        **begun(folder, demo),
        **SHAPE,
        intermediate_size=256,
        num_hidden_layers=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return made(folder, MixtralForCausalLM, config)


def adapter(folder: Path, model: Path) -> Path:
    """A LoRA adapter with random weights for a Llama model's queries and values."""
    config = LlamaConfig.from_pretrained(model)
    head_dim = config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    sizes = {"q_proj": config.hidden_size, "v_proj": kv_heads * head_dim}
    torch.manual_seed(ADAPTER_SEED)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for name, size in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            into = torch.randn(ADAPTER_RANK, config.hidden_size)
            weights[f"{at}.lora_A.weight"] = into / config.hidden_size**0.5
            weights[f"{at}.lora_B.weight"] = torch.randn(size, ADAPTER_RANK) * 0.2
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": sorted(sizes),
        "bias": "none",
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def grown(text: str, tokens: int, demo: Path) -> str:
    """The text with words after it, so many tokens long."""
    count = len(AutoTokenizer.from_pretrained(demo)(text)["input_ids"])
    assert count <= tokens
    return text + " and" * (tokens - count)
