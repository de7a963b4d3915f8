# pyright: reportUnknownMemberType=false
"""What a step promises beside its numbers, on a small random model."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.engine.errors import (
    BrokenModel,
    InvalidStep,
    ModelUnavailable,
    RunClosed,
    RunFull,
    StepCancelled,
    UnsupportedModel,
)
from kvtide.engine.loading import LoadedModel, load_model
from kvtide.engine.memory import KEY, VALUE, KvRun
from kvtide.engine.runner import Chunk

LAYERS = 4
PROMPT = list(range(3, 83))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder)


def _bytes(run: KvRun, start: int, end: int) -> list[bytes]:
    return [
        bytes(run.part(layer, kind, start, end))
        for layer in range(LAYERS)
        for kind in (KEY, VALUE)
    ]


def _copy(source: KvRun, target: KvRun, start: int, end: int) -> None:
    for layer in range(LAYERS):
        for kind in (KEY, VALUE):
            target.part(layer, kind, start, end)[:] = source.part(
                layer, kind, start, end
            )


def test_the_hook_sees_each_layer_when_its_bytes_are_final(model: LoadedModel):
    run = model.new_run(80)
    seen: list[tuple[int, bytes, bytes]] = []

    def on_layer(layer: int) -> None:
        key, value = (bytes(run.part(layer, kind, 0, 80)) for kind in (KEY, VALUE))
        seen.append((layer, key, value))

    model.runner.step([Chunk(run, PROMPT, 0)], on_layer)

    assert [layer for layer, _, _ in seen] == list(range(LAYERS))
    assert [part for _, k, v in seen for part in (k, v)] == _bytes(run, 0, 80)


def test_blocks_of_another_run_serve_as_prefix(model: LoadedModel):
    """Block by block through `part`, as bytes come from the pool: the same logits."""
    first = model.new_run(96)
    model.runner.step([Chunk(first, PROMPT[:64], 0)])
    second = model.new_run(80)
    for start in range(0, 64, 16):
        _copy(first, second, start, start + 16)
    second.length = 64
    [expected] = model.runner.step([Chunk(first, PROMPT[64:], 64, want_logits=True)])
    [actual] = model.runner.step([Chunk(second, PROMPT[64:], 64, want_logits=True)])

    assert actual is not None
    assert expected is not None
    assert torch.equal(actual, expected)
    assert _bytes(first, 0, 80) == _bytes(second, 0, 80)


def test_a_prefix_may_arrive_layer_by_layer_during_the_step(model: LoadedModel):
    """The hook may wait for a layer's prefix: its attention has not begun."""
    first = model.new_run(80)
    [expected] = model.runner.step([Chunk(first, PROMPT, 0, want_logits=True)])
    second = model.new_run(80)
    second.length = 48

    def load(layer: int) -> None:
        for kind in (KEY, VALUE):
            second.part(layer, kind, 0, 48)[:] = first.part(layer, kind, 0, 48)

    [actual] = model.runner.step([Chunk(second, PROMPT[48:], 48, True)], load)

    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_cancelled_between_layers_and_computed_again(model: LoadedModel):
    run = model.new_run(80)
    model.runner.step([Chunk(run, PROMPT[:30], 0)])
    before = _bytes(run, 0, 30)
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    with pytest.raises(StepCancelled):
        model.runner.step([Chunk(run, PROMPT[30:], 30)], cancelled=cancelled)

    assert len(asked) == 3
    assert run.length == 30
    assert _bytes(run, 0, 30) == before
    [logits] = model.runner.step([Chunk(run, PROMPT[30:], 30, want_logits=True)])
    fresh = model.new_run(80)
    model.runner.step([Chunk(fresh, PROMPT[:30], 0)])
    [expected] = model.runner.step([Chunk(fresh, PROMPT[30:], 30, want_logits=True)])
    assert logits is not None
    assert expected is not None
    assert torch.equal(logits, expected)


def test_a_hook_that_raises_gives_the_step_up(model: LoadedModel):
    run = model.new_run(80)

    def on_layer(layer: int) -> None:
        if layer == 1:
            message = "no longer wanted"
            raise StepCancelled(message)

    with pytest.raises(StepCancelled, match="no longer wanted"):
        model.runner.step([Chunk(run, PROMPT, 0)], on_layer)

    assert run.length == 0
    model.runner.step([Chunk(run, PROMPT, 0)])
    assert run.length == 80


def test_a_run_closed_in_mid_step_ends_the_step(model: LoadedModel):
    """A cancel may free the run at any moment; the runner must go on serving."""
    run, other = model.new_run(80), model.new_run(80)

    def on_layer(layer: int) -> None:
        if layer == 2:
            run.close()

    with pytest.raises(RunClosed):
        model.runner.step([Chunk(other, PROMPT, 0), Chunk(run, PROMPT, 0)], on_layer)

    assert other.length == 0
    model.runner.step([Chunk(other, PROMPT, 0)])
    assert other.length == 80


def test_a_chunk_below_the_length_replaces_what_followed(model: LoadedModel):
    run = model.new_run(80)
    model.runner.step([Chunk(run, PROMPT, 0)])
    model.runner.step([Chunk(run, [5, 6], 10)])

    assert run.length == 12


def test_refuses_steps_that_make_no_sense_and_changes_nothing(model: LoadedModel):
    run = model.new_run(90)
    model.runner.step([Chunk(run, PROMPT[:20], 0)])
    before = _bytes(run, 0, 90)
    closed = model.new_run(10)
    closed.close()
    large = model.new_run(200)
    large.length = 90
    for chunks, error, message in (
        ([Chunk(run, [], 20)], InvalidStep, "no tokens"),
        ([Chunk(run, [1], 21)], InvalidStep, "starts at 21"),
        ([Chunk(run, [1], -1)], InvalidStep, "starts at -1"),
        ([Chunk(run, [1, 100], 20)], InvalidStep, "vocabulary, 0 to 99"),
        ([Chunk(run, [-1], 20)], InvalidStep, "vocabulary"),
        ([Chunk(run, [1], 20), Chunk(run, [1], 20)], InvalidStep, "share a run"),
        ([Chunk(run, [1] * 71, 20)], RunFull, "room for 90"),
        ([Chunk(large, [1] * 7, 90)], InvalidStep, "longest sequence has 96"),
        ([Chunk(run, [1], 20), Chunk(closed, [1], 0)], RunClosed, "closed"),
    ):
        with pytest.raises(error, match=message):
            model.runner.step(chunks)

    assert run.length == 20
    assert _bytes(run, 0, 90) == before
    assert model.runner.step([]) == []


def test_one_step_at_a_time(model: LoadedModel):
    run, other = model.new_run(80), model.new_run(80)
    refused: list[str] = []

    def intrude(layer: int) -> None:
        def step() -> None:
            try:
                model.runner.step([Chunk(other, PROMPT, 0)])
            except InvalidStep as error:
                refused.append(str(error))

        if layer == 0:
            thread = threading.Thread(target=step)
            thread.start()
            thread.join(10)

    model.runner.step([Chunk(run, PROMPT, 0)], intrude)

    assert len(refused) == 1
    assert "already running" in refused[0]
    assert run.length == 80
    assert other.length == 0


def test_threads_are_set_deliberately(folder: Path):
    before = torch.get_num_threads()
    try:
        load_model(folder, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_no_such_model(folder: Path):
    with pytest.raises(ModelUnavailable, match="it is a file"):
        load_model(folder / "model.safetensors")
    with pytest.raises(ModelUnavailable, match="no such folder"):
        load_model(Path("nowhere/at/all"))
    with pytest.raises(ModelUnavailable, match="OWNER/NAME"):
        load_model("nowhere")


def test_pickles_are_not_opened(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(BrokenModel, match=r"model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n.")
    with pytest.raises(UnsupportedModel, match="pickles"):
        load_model(tmp_path)


def test_damaged_or_foreign_weights_are_named(folder: Path, tmp_path: Path):
    config = (folder / "config.json").read_text()
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    for change, error, message in (
        (('_layers": 4', '_layers": 5'), BrokenModel, r"lack model\.layers\.4"),
        (('_layers": 4', '_layers": 3'), UnsupportedModel, r"layers\.3.*8 more"),
        (('_size": 48', '_size": 64'), BrokenModel, r"\(48, 32\), .* says \(64, 32\)"),
    ):
        assert change[0] in config
        (tmp_path / "config.json").write_text(config.replace(*change))
        with pytest.raises(error, match=message):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(BrokenModel, match="no safetensors file"):
        load_model(tmp_path)


def test_weights_in_several_files(folder: Path, tmp_path: Path):
    whole = LlamaForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = load_model(tmp_path)
    [logits] = ours.runner.step([Chunk(ours.new_run(80), PROMPT, 0, True)])
    expected = load_model(folder)
    [same] = expected.runner.step([Chunk(expected.new_run(80), PROMPT, 0, True)])

    assert logits is not None
    assert same is not None
    torch.testing.assert_close(logits, same)


def test_the_hub_out_of_reach_is_said():
    """In a process of its own: the hub's client reads its address when imported."""
    code = (
        "from kvtide.engine.loading import load_model\n"
        "from kvtide.engine.errors import ModelUnavailable\n"
        "try:\n    load_model('owner/model')\n"
        "except ModelUnavailable as error:\n    print(error)"
    )
    ran = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        env={"HF_ENDPOINT": "http://127.0.0.1:9", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert ran.stdout.strip() == (
        "model 'owner/model' is not available:"
        " the hub can't be reached; give a local folder instead"
    )
