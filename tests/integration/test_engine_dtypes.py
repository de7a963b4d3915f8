# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Each number format stays within its stated bound of transformers in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.oracle.reference import Oracle
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

from kvtide.engine.errors import UnsupportedModel
from kvtide.engine.loading import load_model
from kvtide.engine.runner import Chunk
from kvtide.kv import Layout

BOUNDS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Root mean square error of logits, as a part of the logits' standard deviation.

Teacher forcing: every position gets the reference's own tokens. docs/limits.md says so.
"""

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
FAMILIES: list[tuple[type[PreTrainedModel], Any]] = [
    (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    (MistralForCausalLM, MistralConfig(**SHAPE, head_dim=16, sliding_window=None)),
    (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda f: f[0].__name__)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    family, config = request.param
    made = tmp_path_factory.mktemp(family.__name__)
    torch.manual_seed(0)
    family(config).save_pretrained(made)
    return made


@pytest.mark.parametrize("dtype", BOUNDS)
def test_logits_stay_within_the_bound(folder: Path, dtype: str):
    noise = torch.Generator().manual_seed(1)
    prompt: list[int] = torch.randint(3, 300, (96,), generator=noise).tolist()
    expected = Oracle(folder).logits(prompt, 96)
    model = load_model(folder, dtype=dtype)
    run = model.new_run(96)
    rows: list[torch.Tensor] = []
    # chunks first, then token by token: both ways of attending
    ends = [*range(16, 65, 16), *range(65, 97)]
    for start, end in zip([0, *ends], ends, strict=False):
        [logits] = model.runner.step([Chunk(run, prompt[start:end], start, True)])
        assert logits is not None
        assert logits.dtype == torch.float32
        rows.append(logits)
    wanted = expected[[end - 1 for end in ends]]
    error = (torch.stack(rows) - wanted).square().mean().sqrt() / wanted.std()

    assert float(error) < BOUNDS[dtype]
    if dtype != "float32":  # and it is really computed in this format
        assert float(error) > 1e-5
    run.close()
    model.close()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_kv_has_the_format_of_the_layout(folder: Path, dtype: str):
    model = load_model(folder, dtype=dtype)
    run = model.new_run(64)
    model.runner.step([Chunk(run, [5, 6, 7], 0)])
    layout = Layout.of(model.facts)

    assert model.facts.kv_dtype == dtype
    assert f"compute={dtype};" in model.facts.numerics
    assert len(run.part(0, 0, 0, 64)) == layout.part_bytes
    assert run.keys(0).dtype == getattr(torch, dtype)
    run.close()
    model.close()


def test_another_format_is_refused(folder: Path):
    with pytest.raises(UnsupportedModel, match="int8 is not served"):
        load_model(folder, dtype="int8")
