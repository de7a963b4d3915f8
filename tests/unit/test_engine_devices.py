# pyright: reportUnknownMemberType=false
"""Where a model runs; KV on a device with its bytes on the host."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.engine.accelerator import choose_device
from kvtide.engine.device_memory import DeviceRun
from kvtide.engine.errors import RunClosed, UnsupportedDevice
from kvtide.engine.loading import LoadedModel, load_model
from kvtide.engine.memory import KEY, VALUE, KvRun
from kvtide.engine.runner import Chunk

PROMPT = [(7 * i) % 90 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("devices")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_model(folder)


def parts(run: KvRun, end: int) -> list[bytes]:
    kinds = (KEY, VALUE)
    return [bytes(run.part(i, kind, 0, end)) for i in range(3) for kind in kinds]


def mirrored(model: LoadedModel) -> DeviceRun:
    """Memory apart from the host's, which is all that a run knows of a device."""
    return DeviceRun(model.facts, 64, torch.device("cpu"))


def test_a_device_run_holds_the_same_bytes_and_gives_the_same_logits(
    model: LoadedModel,
):
    plain, device = model.new_run(64), mirrored(model)
    for start, end in ((0, 16), (16, 39), (39, 40)):
        [expected] = model.runner.step(
            [Chunk(plain, PROMPT[start:end], start, want_logits=True)]
        )
        [logits] = model.runner.step(
            [Chunk(device, PROMPT[start:end], start, want_logits=True)]
        )
        assert expected is not None
        assert logits is not None
        assert torch.equal(logits, expected)
    assert parts(device, 40) == parts(plain, 40)


def test_what_others_wrote_on_the_host_is_attended_to(model: LoadedModel):
    """Read before the step, or layer by layer while it runs; then written anew."""
    plain = model.new_run(64)
    [expected] = model.runner.step([Chunk(plain, PROMPT, 0, want_logits=True)])
    early, late, again = (mirrored(model) for _ in range(3))

    def fill(run: KvRun, layer: int) -> None:
        for kind in (KEY, VALUE):
            run.part(layer, kind, 0, 32)[:] = plain.part(layer, kind, 0, 32)

    for layer in range(3):
        fill(early, layer)
    model.runner.step([Chunk(again, PROMPT[::-1], 0)])
    again.length = 0
    for layer in range(3):
        fill(again, layer)
    for run in (early, late, again):
        run.length = 32
        [logits] = model.runner.step(
            [Chunk(run, PROMPT[32:], 32, want_logits=True)],
            on_layer=lambda layer: fill(late, layer),
        )
        assert logits is not None
        assert expected is not None
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_closed_device_run_gives_nothing(model: LoadedModel):
    run = mirrored(model)
    run.close()
    for give in (run.keys, run.values):
        with pytest.raises(RunClosed):
            give(0)


def test_the_cpu_is_always_there_and_others_are_named():
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(UnsupportedDevice, match="nonsense"):
        choose_device("nonsense")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_auto_is_the_cpu_and_cuda_is_refused(tmp_path: Path):
    assert choose_device("auto").type == "cpu"
    for wanted in ("cuda", "cuda:1", "xpu"):
        with pytest.raises(UnsupportedDevice, match="finds no accelerator"):
            load_model(tmp_path, device=wanted)


def test_one_file_names_an_accelerators_api():
    root = Path(__file__).resolve().parents[2]
    names = re.compile(r"torch\.(accelerator|cuda|xpu|mps|npu|musa|mlu)\b")
    found = {
        path.name
        for folder in ("libs", "services")
        for path in (root / folder).rglob("*.py")
        if names.search(path.read_text())
    }
    assert found == {"accelerator.py"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_accelerator_computes_what_the_cpu_does(
    model: LoadedModel, tmp_path: Path, dtype: str
):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    rows: list[torch.Tensor] = []
    for device in ("cpu", "auto"):
        loaded = load_model(tmp_path, dtype=dtype, device=device)
        run = loaded.new_run(64)
        loaded.runner.step([Chunk(run, PROMPT[:30], 0)])
        [logits] = loaded.runner.step([Chunk(run, PROMPT[30:], 30, want_logits=True)])
        assert logits is not None
        rows.append(logits.cpu())
    error = (rows[0] - rows[1]).square().mean().sqrt() / rows[0].std()
    assert float(error) < (1e-3 if dtype == "float32" else 5e-2)
