# pyright: reportUnknownMemberType=false
"""Where a model runs; KV on a device with its bytes on the host."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.engine.accelerator import choose_device
from kvtide.engine.architecture import read_architecture
from kvtide.engine.decoder import Decoder
from kvtide.engine.device_memory import DeviceRun
from kvtide.engine.errors import NoPages, RunClosed, UnsupportedDevice
from kvtide.engine.loading import LoadedModel, load_model
from kvtide.engine.memory import KEY, VALUE, KvRun
from kvtide.engine.paged_attention import PagedAttention, served
from kvtide.engine.paged_memory import PagedRun, PagePool
from kvtide.engine.runner import Chunk, Runner
from kvtide.engine.weights import read_weights

PROMPT = [(7 * i) % 90 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return folder


@pytest.fixture(scope="module")
def model(model_folder: Path) -> LoadedModel:
    return load_model(model_folder)


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


class PretendedKernel:
    """FlashInfer's paged kernel by its contract, without a GPU: checks what it is given."""

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, *given: Any, causal: bool, q_data_type: torch.dtype) -> None:
        assert causal
        assert q_data_type is torch.float32
        rows, starts, pages, fills, heads, kv_heads, head_dim, page_tokens = given
        assert all(one.dtype is torch.int32 for one in (rows, starts, pages, fills))
        assert (heads, kv_heads, head_dim, page_tokens) == (4, 2, 8, 16)
        self._rows, self._starts = rows.tolist(), starts.tolist()
        self._pages, self._fills = pages.long(), fills.tolist()
        self.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        assert self._rows[-1] == len(q)
        outs: list[torch.Tensor] = []
        for i, fill in enumerate(self._fills):
            assert 1 <= fill <= 16
            table = self._pages[self._starts[i] : self._starts[i + 1]]
            end = (len(table) - 1) * 16 + fill
            k, v = (
                paged_kv_cache[table, kind].flatten(0, 1)[:end].repeat_interleave(2, 1)
                for kind in (KEY, VALUE)
            )
            mine = q[self._rows[i] : self._rows[i + 1]]
            seen = torch.ones(len(mine), end, dtype=torch.bool).tril(end - len(mine))
            scores = torch.einsum("qhd,khd->hqk", mine, k) / 8**0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)


def test_pages_and_their_tables_give_the_same_logits_and_bytes(
    model: LoadedModel, model_folder: Path
):
    shape = read_architecture(model_folder, "test")
    pool = PagePool(model.facts, 9, 16, torch.device("cpu"))
    kernel = PretendedKernel()
    attention = PagedAttention(kernel, pool, shape, torch.float32)
    weights = read_weights(model_folder, shape, torch.float32, lambda _: None)
    decoder = Decoder(shape, weights, torch.float32, paged=attention)
    runner = Runner(decoder, model.facts)
    plain = [model.new_run(48) for _ in range(2)]
    paged = [PagedRun(model.facts, 48, pool) for _ in range(2)]
    assert pool.free == 3
    pairs = ((plain, model.runner), (paged, runner))
    other = PROMPT[::-1]
    for steps in (((0, 20), (0, 16)), ((20, 37), (16, 17)), ((37, 38), (17, 18))):
        both: list[list[torch.Tensor | None]] = []
        for runs, engine in pairs:
            chunks = [
                Chunk(run, text[start:end], start, want_logits=run is runs[1])
                for run, text, (start, end) in zip(
                    runs, (PROMPT, other), steps, strict=True
                )
            ]
            both.append(engine.step(chunks))
        expected, logits = both[0][1], both[1][1]
        assert expected is not None
        assert logits is not None
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert kernel.plans == 6  # the last layer attends with the wanted rows alone
    for mine, theirs in zip(paged, plain, strict=True):
        got, wanted = parts(mine, 18), parts(theirs, 18)
        for one, two in zip(got, wanted, strict=True):
            torch.testing.assert_close(
                torch.frombuffer(bytearray(one), dtype=torch.float32),
                torch.frombuffer(bytearray(two), dtype=torch.float32),
                atol=1e-4,
                rtol=1e-4,
            )
    read = PagedRun(model.facts, 48, pool)  # a prefix that others wrote on the host
    for layer in range(3):
        for kind in (KEY, VALUE):
            read.part(layer, kind, 0, 32)[:] = plain[0].part(layer, kind, 0, 32)
    read.length = 32
    [logits] = runner.step([Chunk(read, PROMPT[32:], 32, want_logits=True)])
    again = model.new_run(48)
    [expected] = model.runner.step([Chunk(again, PROMPT, 0, want_logits=True)])
    assert logits is not None
    assert expected is not None
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(NoPages):
        PagedRun(model.facts, 16, pool)
    for run in (*paged, read):
        run.close()
        run.close()
    assert pool.free == 9


def test_without_cuda_or_flashinfer_pages_are_not_used():
    half, cuda = torch.float16, torch.device("cuda")
    assert not served(torch.device("cpu"), half, 64)
    assert not served(cuda, torch.float32, 64)
    assert not served(cuda, half, 80)
    assert served(cuda, half, 64) == (find_spec("flashinfer") is not None)


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
def test_an_accelerator_computes_what_the_cpu_does(tmp_path: Path, dtype: str):
    """With pages where FlashInfer is installed and the type is its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
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
