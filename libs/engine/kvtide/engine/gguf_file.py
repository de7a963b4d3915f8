"""A GGUF file: typed metadata, and tensors as numbers."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

from kvtide.engine.errors import BrokenModel, UnsupportedModel
from kvtide.engine.gguf_header import check_header

# what the reader, which trusts its input, runs into when the file lies or ends early
_READER_ERRORS = (
    *(ValueError, IndexError, KeyError, TypeError, OverflowError, OSError),
    *(MemoryError, AttributeError),
)


class GgufFile:
    """A GGUF file that was opened; its tensors stay on disk until they are read.

    Attributes:
        tensors: name → where it lies.
    """

    def __init__(self, path: Path) -> None:
        """Read metadata and the table of tensors.

        Raises:
            BrokenModel: it is no GGUF file, or is cut short.
        """
        self.path = path
        try:
            check_header(path)
            self._reader = GGUFReader(path)
            self.tensors: dict[str, ReaderTensor] = {
                tensor.name: tensor for tensor in self._reader.tensors
            }
        except _READER_ERRORS as error:
            reason = f"is no whole GGUF file ({type(error).__name__}: {error})"
            raise BrokenModel(path, reason) from error

    def find(self, name: str) -> Any:
        """A field of the metadata; None if it is not there."""
        field = self._reader.get_field(name)
        if field is None:
            return None
        try:
            return field.contents()
        except _READER_ERRORS as error:
            raise BrokenModel(self.path, f"its field {name} is damaged") from error

    def __getitem__(self, name: str) -> Any:
        """A field that must be there."""
        value = self.find(name)
        if value is None:
            raise BrokenModel(self.path, f"lacks the field {name}")
        return value

    def decimal(self, name: str) -> float:
        """A number stored as float32: its shortest decimal text is what was meant."""
        value = self[name]
        if not isinstance(value, float | int):
            raise BrokenModel(self.path, f"its field {name} is no number")
        return float(str(np.float32(value)))

    def integer(self, name: str) -> int:
        """A whole number, the same for all layers."""
        value = self[name]
        if not isinstance(value, int):
            raise UnsupportedModel(
                str(self.path), f"its {name} is not one number for all layers"
            )
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape as torch has it, slowest first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def weight(self, name: str) -> NDArray[np.float32]:
        """A tensor's numbers, dequantised as the gguf package does it.

        Raises:
            BrokenModel: its bytes don't make the shape that is said.
            UnsupportedModel: of a type that can't be dequantised.
        """
        tensor = self.tensors[name]
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            return np.ascontiguousarray(numbers.reshape(self.shape(name)))
        except NotImplementedError as error:
            reason = f"{name} is of type {tensor.tensor_type.name}"
            raise UnsupportedModel(
                str(self.path), f"{reason}, which can't be dequantised"
            ) from error
        except _READER_ERRORS as error:
            raise BrokenModel(self.path, f"{name} is damaged ({error})") from error


def halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF's Llama rotates neighbouring rows of a head; transformers rotates halves.

    Takes weights [heads * head_dim, columns] or biases [heads * head_dim].
    """
    rows, *columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, *columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, *columns))
