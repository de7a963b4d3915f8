# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Models on disk with random weights, always the same, and the demo model's tokenizer."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

SEED = 4


def begun(folder: Path, demo: Path) -> dict[str, Any]:
    """Make the folder, with the tokenizer; what a configuration must say to fit it."""
    folder.mkdir()
    for file in demo.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder)
    real = LlamaConfig.from_pretrained(demo)
    return {
        "vocab_size": real.vocab_size,
        "bos_token_id": real.bos_token_id,
        "eos_token_id": real.eos_token_id,
        "pad_token_id": real.pad_token_id,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }


def made(folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig) -> Path:
    """The folder, with weights and their configuration in it."""
    torch.manual_seed(SEED)
    kind(config).save_pretrained(folder)
    return folder
