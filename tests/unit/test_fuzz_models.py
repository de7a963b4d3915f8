# pyright: reportUnknownVariableType=false
"""Any bytes as a model's files are read, or named as broken: nothing is hung or filled."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.fuzzing import MOST_BYTES, ROUNDS, Target, fuzz
from tests.unit.test_engine_gguf_files import write_gguf

from kvtide.engine.errors import BrokenModel, EngineError
from kvtide.engine.gguf_file import GgufFile
from kvtide.engine.gguf_folder import config_of
from kvtide.engine.gguf_text import tokenizer_of
from kvtide.engine.tensor_files import TensorReader, weight_files

MODEL_FILES = ("m.gguf", "model.safetensors", "model.safetensors.index.json")


def read_gguf(path: Path) -> object:
    file = GgufFile(path)
    return config_of(file), tokenizer_of(file)


def read_tensors(path: Path) -> object:
    return TensorReader((path,), torch.float32).take("x", 8, 8)


def read_index(path: Path) -> object:
    return weight_files(path.parent)


def target(folder: Path, name: str) -> Target:
    path = folder / name
    reads: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
        "m.gguf": (read_gguf, write_gguf),
        "model.safetensors": (
            read_tensors,
            lambda at: save_file({"x": torch.ones(8, 8)}, at),
        ),
        "model.safetensors.index.json": (
            read_index,
            lambda at: at.write_text('{"weight_map": {"x": "a.safetensors"}}'),
        ),
    }
    read, write = reads[name]
    write(path)
    good = path.read_bytes()

    def feed(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return Target(name, feed, (EngineError,), (good,))


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", MODEL_FILES)
def test_any_bytes_are_a_model_or_named_as_broken(
    tmp_path: Path, name: str, rounds: int
) -> None:
    fuzz(target(tmp_path, name), rounds)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def head(tensors: int, fields: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields)


LIES = {
    "fields": head(0, 1 << 62) + text("a") + struct.pack("<IB", 7, 1),
    "tensors": head(1 << 62, 0),
    "numbers": head(0, 1) + text("a") + struct.pack("<IIQ", 9, 0, 1 << 40),
    "strings": head(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 40),
    "string": head(0, 1) + text("a") + struct.pack("<IQ", 8, 1 << 62),
    "arrays in arrays": head(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) * 2000,
    "dimensions": head(1, 0) + text("t") + struct.pack("<I", 1 << 31),
    "kind": head(0, 1) + text("a") + struct.pack("<I", 99),
    "version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_no_count_in_a_header_is_believed(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(LIES[lie])
    tracemalloc.start()
    try:
        with pytest.raises(BrokenModel):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_header_of_tensors_that_claims_all_memory_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length in (1 << 62, 1 << 40, 99_000_000):
        path.write_bytes(struct.pack("<Q", length) + b'{"x":{}}')
        with pytest.raises(BrokenModel):
            read_tensors(path)
