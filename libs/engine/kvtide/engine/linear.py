"""Matrix products with the weights of a model, in the form that is fastest and exact.

The packed form keeps weights as float16 and computes with float32 activations and sums
(FBGEMM). It reads half the bytes, which is what a decode step waits for, and is exact
where every weight is a float16 number; elsewhere the plain form is used.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

WeightForm = Literal["fp16-packed", "plain"]


class Linear(Protocol):
    """y = x W^T + b: [tokens, in] to [tokens, out]."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Multiply; x is contiguous."""
        ...


class PlainLinear:
    """Weights in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        """Multiply; see `Linear`."""
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """Weights packed as float16, float32 activations and sums."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        """Multiply; see `Linear`."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


def packing_available() -> bool:
    """Whether this torch has the packed form (x86 with FBGEMM)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def exact_in_fp16(weight: Tensor) -> bool:
    """Whether rounding the weights to float16 changes none of them."""
    return torch.equal(weight.half().to(weight.dtype), weight)


def make_linear(form: WeightForm, weight: Tensor, bias: Tensor | None) -> Linear:
    """Make a product with weight [out, in] and bias [out]."""
    if form == "fp16-packed":
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
