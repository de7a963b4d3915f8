# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""A random model that is quick on two cores, with the demo model's tokenizer.

Its every token hangs on the KV of all tokens before it, and it runs fifteen times as
fast as the demo model: so a round of a fault sees hundreds of requests.
"""

import os
from pathlib import Path

from tests.integration.random_models import begun, made
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

MODEL = "CHAOS_MODEL"
"""Set to ``demo``: the demo model instead."""
LAYERS, HEADS, HEAD = 8, 3, 64


def chosen() -> str:
    """``small``, or what the environment names."""
    return os.environ.get(MODEL) or "small"


def chaos_model(folder: Path) -> Path:
    """The model that a site serves; made in ``folder``, always the same weights."""
    demo = ensure_demo_model(default_cache_dir())
    if chosen() == "demo":
        return demo
    config = LlamaConfig(
        **begun(folder, demo),
        hidden_size=HEADS * HEAD,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
    )
    return made(folder, LlamaForCausalLM, config)
