# pyright: reportUnknownVariableType=false
"""GGUF and safetensors files that are damaged or of the wrong kind."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import save_file

from kvtide.engine.errors import BrokenModel, EngineError, UnsupportedModel
from kvtide.engine.gguf_file import GgufFile
from kvtide.engine.gguf_folder import config_of, ensure_gguf_folder
from kvtide.engine.gguf_text import tokenizer_of
from kvtide.engine.loading import load_model
from kvtide.engine.tensor_files import TensorReader, weight_files


def write_gguf(path: Path, kind: str = "llama", **changes: object) -> Path:
    """A file with one tensor, enough for its metadata to be read."""
    writer = GGUFWriter(path, kind)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(str(changes.get("tokenizer", "gpt2")))
    writer.add_tokenizer_pre(str(changes.get("pre", "smollm")))
    writer.add_token_list(["a", "b", "ab", "<|end|>"])
    normal, control = TokenType.NORMAL, TokenType.CONTROL
    writer.add_token_types([normal, normal, normal, control])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    if "window" in changes:
        writer.add_sliding_window(16)
    if "experts" in changes:
        writer.add_expert_count(8)
    if "scaling" in changes:
        writer.add_string(f"{kind}.rope.scaling.type", "yarn")
    if "rotated" in changes:
        writer.add_rope_dimension_count(4)
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.random((4, 32), np.float32))
    if "freqs" in changes:
        writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_config_comes_from_the_metadata(tmp_path: Path):
    config = config_of(GgufFile(write_gguf(tmp_path / "m.gguf")))

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["head_dim"]) == (32, 8)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (4, True)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 10_000.0)
    assert config["eos_token_id"] == [3]


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ("window", "llama", "sliding-window"),
        ("experts", "llama", "mixture of experts"),
        ("scaling", "qwen2", "scaled"),
        ("freqs", "llama", "safetensors instead"),
        ("rotated", "llama", "part of each head"),
        ("none", "gemma2", "architecture is 'gemma2'"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused(
    tmp_path: Path, change: str, kind: str, reason: str
):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", kind, **{change: True}))
    with pytest.raises(UnsupportedModel, match=reason):
        config_of(file)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_byte_level_tokenizers_are_built(tmp_path: Path, pre: str):
    tokenizer = tokenizer_of(GgufFile(write_gguf(tmp_path / "m.gguf", pre=pre)))

    assert tokenizer.encode("abba<|end|>").ids == [2, 1, 0, 3]


def test_unknown_tokenizers_are_refused(tmp_path: Path):
    for change, reason in (({"pre": "tekken"}, "tekken"), ({"tokenizer": "t5"}, "t5")):
        file = GgufFile(write_gguf(tmp_path / "m.gguf", **change))
        with pytest.raises(UnsupportedModel, match=reason):
            tokenizer_of(file)


def test_a_file_that_ends_anywhere_is_broken_and_nothing_is_left(tmp_path: Path):
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (*range(0, len(whole) - 1, 13), len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(BrokenModel):
            ensure_gguf_folder(cut, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*"))


def test_no_flipped_byte_raises_anything_else(tmp_path: Path):
    whole = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    flipped = tmp_path / "flipped.gguf"
    rng = np.random.default_rng(1)
    for place in rng.integers(0, len(whole) - 512, 120).tolist():
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        flipped.write_bytes(changed)
        try:
            file = GgufFile(flipped)
            config_of(file)
            tokenizer_of(file)
        except EngineError as error:
            assert str(flipped) in str(error)  # noqa: PT017 - it may also pass


def test_a_folder_is_made_once_and_again_when_the_file_moved(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    made = ensure_gguf_folder(path, tmp_path / "cache")
    stamp = (made / "config.json").stat().st_mtime_ns

    assert ensure_gguf_folder(path, tmp_path / "cache") == made
    assert (made / "config.json").stat().st_mtime_ns == stamp
    moved = path.rename(tmp_path / "n.gguf")
    again = ensure_gguf_folder(moved, tmp_path / "cache")
    assert (again / "weights.gguf").resolve() == moved
    assert json.loads((again / "tokenizer_config.json").read_text())["eos_token"]


def test_a_missing_tensor_is_named(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(BrokenModel, match="output_norm"):
        load_model(path, cache_dir=tmp_path / "cache")


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    raw = np.zeros((2, 32), np.int8)
    writer.add_tensor("x", raw, raw_dtype=GGMLQuantizationType.I8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="I8"):
        GgufFile(tmp_path / "m.gguf").weight("x")


def test_several_gguf_files_in_a_folder_are_not_guessed_among(tmp_path: Path):
    for name in ("a", "b"):
        write_gguf(tmp_path / f"{name}.gguf")
    with pytest.raises(UnsupportedModel, match="several GGUF"):
        weight_files(tmp_path)


def test_a_safetensors_file_that_ends_anywhere_is_broken(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(8, 8)}, path)
    whole = path.read_bytes()
    for size in (0, 4, 8, 40, len(whole) - 4):
        path.write_bytes(whole[:size])
        with pytest.raises(BrokenModel):
            TensorReader((path,), torch.float32).take("x", 8, 8)
