"""The weights of a GGUF file under the names and in the order of transformers."""
# pyright: reportUnknownMemberType=false

import math

import torch
from torch import Tensor

from kvtide.engine.errors import BrokenModel, UnsupportedModel
from kvtide.engine.gguf_file import GgufFile, halves

_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PAIRED = ("attn_q", "attn_k")


class GgufTensors:
    """Hands out each tensor once, and knows what nobody asked for."""

    def __init__(self, file: GgufFile, dtype: torch.dtype) -> None:
        self._file = file
        self._dtype = dtype
        self._left = set(file.tensors)
        self._paired = file["general.architecture"] == "llama"

    def take(self, name: str, *shape: int) -> Tensor:
        """Read a tensor of this shape, in the compute dtype.

        Raises:
            BrokenModel: it is missing, or not what the metadata says.
            UnsupportedModel: it is of a type that can't be dequantised.
        """
        stored = _stored_name(name)
        if stored not in self._left:
            raise BrokenModel(self._file.path, f"lacks the tensor {stored}")
        self._left.discard(stored)
        found = self._file.shape(stored)
        if found != shape or math.prod(shape) == 0:
            raise BrokenModel(
                self._file.path,
                f"{stored} has shape {found}, the metadata say {shape}",
            )
        weight = self._file.weight(stored)
        module = stored.split(".")[-2]
        if self._paired and module in _PAIRED:
            kind = "head_count" if module == "attn_q" else "head_count_kv"
            weight = halves(weight, self._file.integer(f"llama.attention.{kind}"))
        return torch.from_numpy(weight).to(self._dtype)

    def ignore(self, name: str) -> None:
        """Let a tensor be there for nothing."""
        self._left.discard(_stored_name(name))

    def refuse_rest(self) -> None:
        """Raise UnsupportedModel if some tensors were not asked for."""
        if self._left:
            raise UnsupportedModel(
                str(self._file.path),
                "it has weights that its architecture has no place for:"
                f" {min(self._left)} and {len(self._left) - 1} more",
            )


def _stored_name(name: str) -> str:
    """GGUF's name of a transformers tensor."""
    module, kind = name.rsplit(".", 1)
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    layer, inner = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_INNER[inner]}.{kind}"
