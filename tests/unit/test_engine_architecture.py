from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvtide.engine.architecture import ConfigFile, read_architecture
from kvtide.engine.errors import BrokenModel, UnsupportedModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "eos_token_id": [7, 2],
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _folder(path: Path, config: object) -> Path:
    (path / "config.json").write_bytes(msgspec.json.encode(config))
    return path


def test_reads_shape_and_defaults(tmp_path: Path):
    read = read_architecture(_folder(tmp_path, LLAMA), "m")

    assert (read.family, read.heads, read.kv_heads, read.head_dim) == (
        "llama",
        4,
        2,
        16,
    )
    assert read.rope.canonical() == "rope=default:theta=10000"
    assert read.eos_token_ids == (2, 7)
    assert not read.qkv_bias
    assert not read.head_norms


def test_generation_config_decides_where_to_stop(tmp_path: Path):
    _folder(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')

    assert read_architecture(tmp_path, "m").eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_theta": 5e5}, "rope=default:theta=500000"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope=default:theta=1e+06"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope=linear:theta=10000:factor=4",
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
            "rope=llama3:theta=500000:factor=8:low=1:high=4:original=64",
        ),
    ],
)
def test_rope_settings_old_and_new(
    tmp_path: Path, change: dict[str, Any], expected: str
):
    read = read_architecture(_folder(tmp_path, LLAMA | change), "m")

    assert read.rope.canonical() == expected


def test_biases_and_norms_follow_the_family(tmp_path: Path):
    def flags(name: str, **change: object) -> tuple[bool, bool, bool, bool, int]:
        config = LLAMA | {"architectures": [name]} | change
        read = read_architecture(_folder(tmp_path, config), "m")
        return (
            read.qkv_bias,
            read.output_bias,
            read.mlp_bias,
            read.head_norms,
            read.head_dim,
        )

    assert flags("MistralForCausalLM", sliding_window=None) == (
        *(False, False, False, False),
        16,
    )
    assert flags("Qwen2ForCausalLM") == (True, False, False, False, 16)
    assert flags("Qwen3ForCausalLM") == (False, False, False, True, 128)
    assert flags("Qwen3ForCausalLM", attention_bias=True)[:2] == (True, True)
    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True)[:3] == (
        *(True, True),
        True,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "not named in config.json"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "max_position_embeddings": 8192,
            },
            "sliding-window",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
            "sliding-window",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
            "sliding-window",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "sliding-window",
        ),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "incomplete"),
        ({"rope_scaling": {"mrope_section": [8, 4, 4]}}, "not understood"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ({"num_key_value_heads": 3}, "divide"),
        ({"num_hidden_layers": 0}, "no layers"),
    ],
)
def test_refuses_what_it_cannot_serve_exactly(
    tmp_path: Path, change: dict[str, Any], reason: str
):
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        read_architecture(_folder(tmp_path, LLAMA | change), "some/model")

    assert caught.value.source == "some/model"


@pytest.mark.parametrize("content", ["", "[]", '{"hidden_size": "64"}', "{"])
def test_names_a_broken_config(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(BrokenModel, match=r"config\.json"):
        read_architecture(tmp_path, "m")


def test_names_a_missing_config(tmp_path: Path):
    with pytest.raises(BrokenModel, match=r"config\.json: can't be read"):
        read_architecture(tmp_path, "m")


HARMLESS = {
    # where it came from, how it is trained, what it outputs beside logits
    *("transformers_version", "_name_or_path", "model_type", "problem_type"),
    *("id2label", "label2id", "initializer_range", "attention_dropout"),
    *("output_hidden_states", "output_attentions", "return_dict", "use_cache"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "dtype", "torch_dtype"),
    *("bos_token_id", "pad_token_id"),
    # no longer read by transformers' own code
    "pretraining_tp",
    # only with use_sliding_window, which is refused; layer_types say the rest
    "max_window_layers",
}


@pytest.mark.parametrize(
    "config", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]
)
def test_no_field_of_transformers_is_overlooked(config: type[PreTrainedConfig]):
    """A field that a new transformers adds must be read, or be found to be harmless."""
    known = {*ConfigFile.__struct_fields__, *HARMLESS}

    assert set(config().to_dict()) - known == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 8),
        ("num_local_experts", 8),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_multiplier", 0.5),
        ("kv_lora_rank", 512),
        ("alibi", True),
    ],
)
def test_another_familys_field_is_refused(tmp_path: Path, field: str, value: object):
    with pytest.raises(UnsupportedModel, match=field):
        read_architecture(_folder(tmp_path, LLAMA | {field: value}), "m")
    for neutral in (None, 1 if field == "attention_multiplier" else 0):
        read_architecture(_folder(tmp_path, LLAMA | {field: neutral}), "m")


def test_a_window_that_nothing_outgrows_is_full_attention(tmp_path: Path):
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    read_architecture(_folder(tmp_path, mistral | {"sliding_window": 256}), "m")
    with pytest.raises(UnsupportedModel, match="sliding-window"):
        read_architecture(_folder(tmp_path, mistral | {"sliding_window": 255}), "m")
