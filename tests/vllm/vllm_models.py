# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Small random models of other kinds than the demo model, with its tokenizer."""

import shutil
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

SEED = 4
HEADS, KV_HEADS, HEAD = 4, 2, 64
WINDOW_TOKENS = 256
SLIDING, FULL = "sliding_attention", "full_attention"


def sliding_model(folder: Path, demo: Path) -> Path:
    """Gemma 3: four layers with a window and two that attend to all, so three groups."""
    ids = _begun(folder, demo)
    config = Gemma3TextConfig(
        vocab_size=ids.vocab_size,
        hidden_size=HEADS * HEAD,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        query_pre_attn_scalar=HEAD,
        max_position_embeddings=4096,
        initializer_range=0.1,
        sliding_window=WINDOW_TOKENS,
        layer_types=[SLIDING, SLIDING, FULL] * 2,
        bos_token_id=ids.bos_token_id,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        tie_word_embeddings=False,
    )
    return _made(folder, Gemma3ForCausalLM, config)


def expert_model(folder: Path, demo: Path) -> Path:
    """Mixtral: of eight experts each token has two."""
    ids = _begun(folder, demo)
    config = MixtralConfig(
        vocab_size=ids.vocab_size,
        hidden_size=HEADS * HEAD,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=ids.bos_token_id,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        tie_word_embeddings=False,
    )
    return _made(folder, MixtralForCausalLM, config)


def grown(text: str, tokens: int, demo: Path) -> str:
    """The text with words after it, so many tokens long."""
    count = len(AutoTokenizer.from_pretrained(demo)(text)["input_ids"])
    assert count <= tokens
    return text + " and" * (tokens - count)


def _begun(folder: Path, demo: Path) -> LlamaConfig:
    """The folder with the demo model's tokenizer, and that model's configuration."""
    folder.mkdir()
    for file in demo.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder)
    return LlamaConfig.from_pretrained(demo)


def _made(
    folder: Path,
    kind: type[PreTrainedModel],
    config: Gemma3TextConfig | MixtralConfig,
) -> Path:
    """Always the same weights."""
    torch.manual_seed(SEED)
    kind(config).save_pretrained(folder)
    return folder
