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
    Idefics3Config,
    Idefics3ForConditionalGeneration,
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
TILE_SIDE, PATCH_SIDE, SHUFFLE = 64, 8, 2
TILE_TOKENS = (TILE_SIDE // PATCH_SIDE // SHUFFLE) ** 2
PICTURE_NAMES = ("<image>", "<fake_token_around_image>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 4 * TILE_SIDE},
    "max_image_size": {"longest_edge": TILE_SIDE},
}
PROCESSOR: dict[str, Any] = {
    "processor_class": "Idefics3Processor",
    "image_seq_len": TILE_TOKENS,
}


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


def picture_model(folder: Path, demo: Path) -> Path:
    """Idefics 3: a token stands for a picture, and becomes 16 for each of its tiles.

    Of the kinds that vLLM's environment can run, for it has no torchvision.
    """
    shape = begun(folder, demo)
    first = shape["vocab_size"]
    shape |= {"vocab_size": first + len(PICTURE_NAMES), "initializer_range": 0.05}
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE_SIDE,
            "patch_size": PATCH_SIDE,
            "initializer_range": 0.2,
        },
        text_config=LlamaConfig(
            **shape, **SHAPE, intermediate_size=512, num_hidden_layers=4
        ),
        image_token_id=first,
        pad_token_id=shape["pad_token_id"],  # pyright: ignore[reportCallIssue] - added by a decorator
        scale_factor=SHUFFLE,
    )
    tokens = [_special(first + i, name) for i, name in enumerate(PICTURE_NAMES)]
    _adapt(folder / "tokenizer.json", added_tokens=tokens)
    _adapt(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    _adapt(folder / "preprocessor_config.json", **PREPROCESSOR)
    _adapt(folder / "processor_config.json", **PROCESSOR)
    return made(folder, Idefics3ForConditionalGeneration, config)


def _adapt(file: Path, **more: Any) -> None:
    """Say these things in a JSON file, too; what is a list there grows."""
    there: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name, value in more.items():
        there[name] = (
            [*there.get(name, ()), *value] if isinstance(value, list) else value
        )
    file.write_text(json.dumps(there))


def _special(token: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, **flags, "special": True}


def grown(text: str, tokens: int, demo: Path) -> str:
    """The text with words after it, so many tokens long."""
    count = len(AutoTokenizer.from_pretrained(demo)(text)["input_ids"])
    assert count <= tokens
    return text + " and" * (tokens - count)
