"""The weight files of a model folder: safetensors or GGUF; nothing else is opened."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtide.engine.errors import BrokenModel, UnsupportedModel

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class _IndexFile(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, by name, or its one GGUF file.

    Raises:
        BrokenModel: there are none, or the index can't be read.
        UnsupportedModel: there are only weights of another, unsafe format.
    """
    if (folder / _SINGLE).exists():
        return (folder / _SINGLE,)
    index = folder / _INDEX
    if index.exists():
        names = set(_read_index(index).weight_map.values())
        bad = [name for name in names if Path(name).name != name]
        if bad:
            raise BrokenModel(index, f"it names a file outside the folder: {bad[0]}")
        return tuple(folder / name for name in sorted(names))
    gguf = sorted(folder.glob("*.gguf"))
    if len(gguf) == 1:
        return (gguf[0],)
    if gguf:
        raise UnsupportedModel(
            str(folder), "it holds several GGUF files; name the one to serve"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise UnsupportedModel(
            str(folder), "its weights are pickles; convert them to safetensors"
        )
    raise BrokenModel(folder, f"holds neither {_SINGLE} nor {_INDEX} nor a GGUF file")


class TensorSource(Protocol):
    """Hands out each tensor of a model once, under transformers' names."""

    def take(self, name: str, *shape: int) -> Tensor:
        """Read a tensor of this shape, in the compute dtype; see `TensorReader`."""
        ...

    def ignore(self, name: str) -> None:
        """Let a tensor be there for nothing."""
        ...

    def refuse_rest(self) -> None:
        """Raise UnsupportedModel if some tensors were not asked for."""
        ...


class OnDevice:
    """Another source's tensors, put on a device."""

    def __init__(self, source: TensorSource, device: torch.device) -> None:
        self._source = source
        self._device = device

    def take(self, name: str, *shape: int) -> Tensor:
        """See `TensorSource.take`."""
        return self._source.take(name, *shape).to(self._device)

    def ignore(self, name: str) -> None:
        """See `TensorSource.ignore`."""
        self._source.ignore(name)

    def refuse_rest(self) -> None:
        """See `TensorSource.refuse_rest`."""
        self._source.refuse_rest()


class TensorReader:
    """Hands out each tensor once, and knows what nobody asked for."""

    def __init__(self, files: tuple[Path, ...], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._folder = files[0].parent
        self._files = {}
        for path in files:
            try:
                opened = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise BrokenModel(path, f"is no safetensors file ({error})") from error
            self._files |= dict.fromkeys(opened.keys(), opened)

    def take(self, name: str, *shape: int) -> Tensor:
        """Read a tensor of this shape, in the compute dtype.

        Raises:
            BrokenModel: it is missing, or not what config.json says.
        """
        opened = self._files.pop(name, None)
        if opened is None:
            raise BrokenModel(self._folder, f"the weight files lack {name}")
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            reason = f"{name} can't be read ({error})"
            raise BrokenModel(self._folder, reason) from error
        if tuple(tensor.shape) != shape:
            raise BrokenModel(
                self._folder,
                f"{name} has shape {tuple(tensor.shape)}, config.json says {shape}",
            )
        if not tensor.dtype.is_floating_point or math.prod(shape) == 0:
            raise BrokenModel(self._folder, f"{name} holds no numbers")
        return tensor.to(self._dtype)

    def ignore(self, name: str) -> None:
        """Let a tensor be there for nothing."""
        self._files.pop(name, None)

    def refuse_rest(self) -> None:
        """Raise UnsupportedModel if some tensors were not asked for."""
        # old checkpoints store the rotary frequencies, which follow from config.json
        rest = sorted(n for n in self._files if not n.endswith("rotary_emb.inv_freq"))
        if rest:
            raise UnsupportedModel(
                str(self._folder),
                f"it has weights that its architecture has no place for: {rest[0]}"
                f" and {len(rest) - 1} more",
            )


def _read_index(path: Path) -> _IndexFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_IndexFile)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise BrokenModel(path, f"can't be read ({error})") from error
