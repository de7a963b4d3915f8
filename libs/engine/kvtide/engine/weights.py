"""Weights of a decoder, read from safetensors files; nothing else is ever opened."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvtide.engine.architecture import Architecture
from kvtide.engine.linear import (
    Linear,
    WeightForm,
    exact_in_fp16,
    make_linear,
    packing_available,
)
from kvtide.engine.tensor_files import TensorReader, weight_files

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


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


@dataclass(frozen=True, slots=True)
class _Matrix:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _LayerMatrices:
    input_norm: Tensor
    qkv: _Matrix
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: _Matrix
    mlp_norm: Tensor
    gate_up: _Matrix
    down: _Matrix

    def exact(self) -> bool:
        return all(
            exact_in_fp16(matrix.weight)
            for matrix in (self.qkv, self.output, self.gate_up, self.down)
        )

    def finish(self, form: WeightForm) -> LayerWeights:
        def linear(matrix: _Matrix) -> Linear:
            return make_linear(form, matrix.weight, matrix.bias)

        return LayerWeights(
            input_norm=self.input_norm,
            qkv=linear(self.qkv),
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            output=linear(self.output),
            mlp_norm=self.mlp_norm,
            gate_up=linear(self.gate_up),
            down=linear(self.down),
        )


def read_weights(
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    on_layer: Callable[[int], None],
) -> DecoderWeights:
    """Read all weights in the compute dtype; `on_layer` is called with each one done.

    Linear weights are packed as float16 if the compute dtype is float32, this torch can
    do it, and not one of them would be rounded; else all stay in the compute dtype.

    Raises:
        BrokenModel: a tensor is missing or has another shape than config.json says.
        UnsupportedModel: there are tensors that this architecture has no use for.
    """
    reader = TensorReader(weight_files(folder), dtype)
    embedding = reader.take(
        _EMBEDDING, architecture.vocab_size, architecture.hidden_size
    )
    if architecture.tied_embeddings:
        head = embedding
        reader.ignore(_HEAD)
    else:
        head = reader.take(_HEAD, architecture.vocab_size, architecture.hidden_size)
    norm = reader.take("model.norm.weight", architecture.hidden_size)
    packable = dtype == torch.float32 and packing_available() and exact_in_fp16(head)
    layers: list[_LayerMatrices] = []
    for index in range(architecture.layers):
        layers.append(_read_layer(reader, architecture, index))
        packable = packable and layers[-1].exact()
        on_layer(index)
    reader.refuse_rest(str(folder))
    form: WeightForm = "fp16-packed" if packable else "plain"
    finished: list[LayerWeights] = []
    layers.reverse()
    while layers:  # a plain matrix goes as soon as its packed form is there
        finished.append(layers.pop().finish(form))
    return DecoderWeights(
        form=form,
        embedding=embedding.half() if packable else embedding,
        layers=tuple(finished),
        norm=norm,
        head=make_linear(form, head, None),
    )


def _read_layer(
    reader: TensorReader, architecture: Architecture, index: int
) -> _LayerMatrices:
    a = architecture
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    q_rows, kv_rows = a.heads * a.head_dim, a.kv_heads * a.head_dim

    def matrix(names: tuple[tuple[str, int], ...], columns: int, bias: bool) -> _Matrix:
        weight = torch.cat(
            [reader.take(f"{name}.weight", rows, columns) for name, rows in names]
        )
        if not bias:
            return _Matrix(weight, None)
        return _Matrix(
            weight,
            torch.cat([reader.take(f"{name}.bias", rows) for name, rows in names]),
        )

    def head_norm(name: str) -> Tensor | None:
        if not a.head_norms:
            return None
        return reader.take(f"{attention}{name}.weight", a.head_dim)

    return _LayerMatrices(
        input_norm=reader.take(prefix + "input_layernorm.weight", a.hidden_size),
        qkv=matrix(
            (
                (attention + "q_proj", q_rows),
                (attention + "k_proj", kv_rows),
                (attention + "v_proj", kv_rows),
            ),
            a.hidden_size,
            a.qkv_bias,
        ),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=matrix(((attention + "o_proj", a.hidden_size),), q_rows, a.output_bias),
        mlp_norm=reader.take(prefix + "post_attention_layernorm.weight", a.hidden_size),
        gate_up=matrix(
            (
                (prefix + "mlp.gate_proj", a.intermediate_size),
                (prefix + "mlp.up_proj", a.intermediate_size),
            ),
            a.hidden_size,
            a.mlp_bias,
        ),
        down=matrix(
            ((prefix + "mlp.down_proj", a.hidden_size),),
            a.intermediate_size,
            a.mlp_bias,
        ),
    )
