"""Rotary positions, as transformers computes them."""

import math

import torch
from torch import Tensor

from kvtide.engine.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angles per position, float32 [head_dim / 2].

    The "llama3" type is the frequency smoothing of Llama 3.1 as transformers'
    `_compute_llama3_parameters` has it.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.type == "default":
        return plain
    if rope.type == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_tokens / rope.low_freq_factor
    shortest = rope.original_max_tokens / rope.high_freq_factor
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (rope.original_max_tokens / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, smoothed, scaled)


class Rotation:
    """The rotation of one batch of positions; made once, used by every layer."""

    def __init__(self, inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        angles = positions.to(torch.float32)[:, None] * inv_freq
        self._cos = torch.cat((angles, angles), -1).cos().to(dtype)[:, None]
        self._sin = angles.sin().to(dtype)[:, None]

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate [tokens, heads, head_dim] into a new tensor."""
        half = heads.shape[-1] // 2
        low, high = heads[..., :half], heads[..., half:]
        rotated = heads * self._cos
        rotated[..., :half].addcmul_(high, self._sin, value=-1)
        rotated[..., half:].addcmul_(low, self._sin)
        return rotated
