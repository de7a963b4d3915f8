"""Weights of a decoder, read from safetensors or GGUF; nothing else is opened."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvtide.engine.accelerator import CPU
from kvtide.engine.architecture import Architecture
from kvtide.engine.gguf_file import GgufFile
from kvtide.engine.gguf_tensors import GgufTensors
from kvtide.engine.linear import (
    Linear,
    WeightForm,
    exact_in_fp16,
    make_linear,
    packing_available,
)
from kvtide.engine.tensor_files import (
    OnDevice,
    TensorReader,
    TensorSource,
    weight_files,
)
from kvtide.engine.threads import one_thread

_EMBEDDING = "model.embed_tokens.weight"
_HEAD_MODULE = "lm_head"
_HEAD = f"{_HEAD_MODULE}.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; q, k and v in one product, gate and up in another."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder.

    `embedding` is [vocab, hidden], kept as float16 where that is exact.
    """

    form: WeightForm
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear


def read_weights(
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    on_layer: Callable[[int], None],
    device: torch.device = CPU,
) -> DecoderWeights:
    """Read all weights in the compute dtype; `on_layer` is called with each one done.

    On the CPU linear weights are packed as float16 if the compute dtype is float32, this
    torch can do it, and not one of them would be rounded; else all stay in the compute dtype. If
    that shows after some layers, reading starts again.

    Raises:
        BrokenModel: a tensor is missing or has another shape than config.json says.
        UnsupportedModel: there are tensors that this architecture has no use for.
    """
    files = weight_files(folder)
    if device == CPU and dtype == torch.float32 and packing_available():
        with contextlib.suppress(_Inexact):
            reader = _open(files, dtype)
            return _WeightReader(reader, architecture, "fp16-packed").read(on_layer)
    source = _open(files, dtype)
    if device != CPU:
        source = OnDevice(source, device)
    return _WeightReader(source, architecture, "plain").read(on_layer)


def _open(files: tuple[Path, ...], dtype: torch.dtype) -> TensorSource:
    if files[0].suffix == ".gguf":
        return GgufTensors(GgufFile(files[0]), dtype)
    return TensorReader(files, dtype)


class _Inexact(Exception):  # noqa: N818
    """A weight is no float16 number."""


class _WeightReader:
    """Reads one decoder's weights in one form."""

    def __init__(
        self, tensors: TensorSource, architecture: Architecture, form: WeightForm
    ) -> None:
        self._tensors = tensors
        self._shape = architecture
        self._form: WeightForm = form

    def read(self, on_layer: Callable[[int], None]) -> DecoderWeights:
        a = self._shape
        embedding = self._tensors.take(_EMBEDDING, a.vocab_size, a.hidden_size)
        if a.tied_embeddings:
            head = self._linear(embedding, None)
            self._tensors.ignore(_HEAD)
        else:
            head = self._product(((_HEAD_MODULE, a.vocab_size),), a.hidden_size)
        if self._form == "fp16-packed" and exact_in_fp16(embedding):
            embedding = embedding.half()
        norm = self._tensors.take("model.norm.weight", a.hidden_size)
        layers: list[LayerWeights] = []
        prefixes = [f"model.layers.{index}." for index in range(a.layers)]
        # packing runs in one thread and takes most of the time
        workers = ThreadPoolExecutor(torch.get_num_threads())
        with one_thread(), workers:
            for layer in workers.map(self._layer, prefixes):
                on_layer(len(layers))
                layers.append(layer)
        self._tensors.refuse_rest()
        return DecoderWeights(self._form, embedding, tuple(layers), norm, head)

    def _layer(self, prefix: str) -> LayerWeights:
        a = self._shape
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_rows, kv_rows = a.heads * a.head_dim, a.kv_heads * a.head_dim
        qkv = (
            (attention + "q_proj", q_rows),
            (attention + "k_proj", kv_rows),
            (attention + "v_proj", kv_rows),
        )
        gate_up = (
            (mlp + "gate_proj", a.intermediate_size),
            (mlp + "up_proj", a.intermediate_size),
        )
        output = ((attention + "o_proj", a.hidden_size),)
        down = ((mlp + "down_proj", a.hidden_size),)
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm", a.hidden_size),
            qkv=self._product(qkv, a.hidden_size, a.qkv_bias),
            query_norm=self._head_norm(attention + "q_norm"),
            key_norm=self._head_norm(attention + "k_norm"),
            output=self._product(output, q_rows, a.output_bias),
            mlp_norm=self._norm(prefix + "post_attention_layernorm", a.hidden_size),
            gate_up=self._product(gate_up, a.hidden_size, a.mlp_bias),
            down=self._product(down, a.intermediate_size, a.mlp_bias),
        )

    def _product(
        self, modules: tuple[tuple[str, int], ...], columns: int, bias: bool = False
    ) -> Linear:
        """One product for modules of (name, rows) that share their input."""
        take = self._tensors.take
        weight = torch.cat([take(f"{n}.weight", rows, columns) for n, rows in modules])
        if not bias:
            return self._linear(weight, None)
        return self._linear(
            weight, torch.cat([take(f"{name}.bias", rows) for name, rows in modules])
        )

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._form == "fp16-packed" and not exact_in_fp16(weight):
            raise _Inexact
        return make_linear(self._form, weight, bias)

    def _norm(self, module: str, size: int) -> Tensor:
        return self._tensors.take(f"{module}.weight", size)

    def _head_norm(self, module: str) -> Tensor | None:
        return (
            self._norm(module, self._shape.head_dim) if self._shape.head_norms else None
        )
