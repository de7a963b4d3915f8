# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Small random models of other kinds than the demo model, with its tokenizer."""

from pathlib import Path
from typing import Any

from tests.integration.random_models import begun, made
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
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


def grown(text: str, tokens: int, demo: Path) -> str:
    """The text with words after it, so many tokens long."""
    count = len(AutoTokenizer.from_pretrained(demo)(text)["input_ids"])
    assert count <= tokens
    return text + " and" * (tokens - count)
