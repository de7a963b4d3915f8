# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Models served from GGUF compute what transformers computes from the same file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind, GGUFWriter, TokenType
from gguf.quants import quant_shape_to_byte_shape, quantize
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from kvtide.engine.loading import load_model
from kvtide.engine.runner import Chunk

VOCAB, HIDDEN, MLP, HEADS, KV_HEADS, LAYERS = 260, 256, 512, 8, 2, 2
HEAD_DIM = {"llama": 32, "qwen2": 32, "qwen3": 128}
RANDOM_BLOCKS = {
    # where a block's float16 scales are; its other bytes may be anything
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
BLOCK_BYTES = {Kind.Q2_K: 84, Kind.Q3_K: 110, Kind.Q4_K: 144, Kind.Q5_K: 176}
BLOCK_BYTES[Kind.Q6_K] = 210
SCALE = {Kind.Q2_K: 2e-3, Kind.Q3_K: 1e-3, Kind.Q4_K: 2e-4, Kind.Q5_K: 1e-4}
SCALE[Kind.Q6_K] = 3e-5
QUANTISED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, *RANDOM_BLOCKS]
PLAIN = [Kind.F32, Kind.F16, Kind.BF16]


def _stored(
    rng: np.random.Generator, shape: tuple[int, ...], kind: Kind
) -> NDArray[np.generic]:
    if kind not in RANDOM_BLOCKS:
        numbers = (rng.standard_normal(shape) * 0.06).astype(np.float32)
        return quantize(numbers, kind)
    raw = rng.integers(0, 256, quant_shape_to_byte_shape(shape, kind), np.uint8)
    blocks = raw.reshape(-1, BLOCK_BYTES[kind])
    scale = np.frombuffer(np.float16(SCALE[kind]).tobytes(), np.uint8)
    for place in RANDOM_BLOCKS[kind]:
        blocks[:, place : place + 2] = scale
    return raw


def _write(path: Path, family: str, kinds: list[Kind]) -> None:
    """A file whose tensors take the kinds in turn."""
    writer = GGUFWriter(path, family)
    _describe(writer, family)
    _add_tensors(writer, family, kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: GGUFWriter, family: str) -> None:
    writer.add_name("random")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM[family])
    writer.add_key_length(HEAD_DIM[family])
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if family.startswith("qwen") else "smollm")
    writer.add_token_list(["t", "1", "t1", *(f"u{i}" for i in range(3, VOCAB))])
    writer.add_token_types([TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(2)


def _add_tensors(writer: GGUFWriter, family: str, kinds: list[Kind]) -> None:
    rng = np.random.default_rng(7)
    size = HEAD_DIM[family]

    def matrix(name: str, rows: int, columns: int, turn: int) -> None:
        kind = kinds[turn % len(kinds)]
        stored = _stored(rng, (rows, columns), kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)

    def vector(name: str, length: int, around: float) -> None:
        numbers = around + 0.2 * rng.standard_normal(length)
        writer.add_tensor(name, numbers.astype(np.float32))

    matrix("token_embd", VOCAB, HIDDEN, 0)
    matrix("output", VOCAB, HIDDEN, 1)
    vector("output_norm.weight", HIDDEN, 1.0)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        for turn, (name, count) in enumerate(heads.items()):
            matrix(f"{at}attn_{name}", count * size, HIDDEN, layer + turn)
            if family == "qwen2":
                vector(f"{at}attn_{name}.bias", count * size, 0.0)
            if family == "qwen3" and name != "v":
                vector(f"{at}attn_{name}_norm.weight", size, 1.0)
        matrix(f"{at}attn_output", HIDDEN, HEADS * size, layer + 3)
        matrix(f"{at}ffn_gate", MLP, HIDDEN, layer + 4)
        matrix(f"{at}ffn_up", MLP, HIDDEN, layer + 5)
        matrix(f"{at}ffn_down", HIDDEN, MLP, layer + 6)
        vector(f"{at}attn_norm.weight", HIDDEN, 1.0)
        vector(f"{at}ffn_norm.weight", HIDDEN, 1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", PLAIN),
        ("llama", QUANTISED),
        ("qwen2", QUANTISED[::-1]),
        ("qwen3", QUANTISED[3:]),
    ],
    ids=["llama-plain", "llama-quantised", "qwen2-quantised", "qwen3-quantised"],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, family: str, kinds: list[Kind]
):
    path = tmp_path / "model.gguf"
    _write(path, family, kinds)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    noise = torch.Generator().manual_seed(1)
    prompt: list[int] = torch.randint(3, VOCAB, (40,), generator=noise).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    model = load_model(path, cache_dir=tmp_path / "cache")
    [logits] = model.runner.step([Chunk(model.new_run(40), prompt, 0, True)])

    assert model.facts.name == "model"
    assert logits is not None
    assert float(expected.std()) > 0.1  # it says something
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)
    model.close()
