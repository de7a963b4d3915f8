"""Whether a GGUF file has what its header says, before anybody believes the header.

The reader of the gguf package takes counts as they are: an array that claims 2**62 numbers
is walked to its end, which is nowhere. Here every count is held against the bytes that
are left. Form: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<4sIQQ")
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_ARRAY = struct.Struct("<IQ")
_STRING_KIND, _ARRAY_KIND = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MOST_DIMENSIONS = 8
_VERSIONS = (2, 3)


def check_header(path: Path) -> None:
    """Walk over metadata and the table of tensors.

    Raises:
        ValueError: a count, length or kind that the file does not bear out.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError("it is empty") from None
        with data:
            _Walk(data).header()


class _Walk:
    """A place in the file that only moves on, and never beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        """At the beginning."""
        self._data = data
        self._at = 0

    def header(self) -> None:
        """The whole of it."""
        magic, version, tensors, fields = self._take(_HEAD)
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ValueError("it does not begin as GGUF of version 2 or 3 does")
        # as few bytes as each of them takes
        self._claim(fields * (_LENGTH.size + _KIND.size) + tensors * _LENGTH.size)
        for _ in range(fields):
            self._string()
            (kind,) = self._take(_KIND)
            self._value(kind)
        for _ in range(tensors):
            self._tensor()

    def _value(self, kind: int) -> None:
        if kind == _STRING_KIND:
            self._string()
        elif kind == _ARRAY_KIND:
            self._array()
        else:
            self._skip(self._size(kind))

    def _array(self) -> None:
        kind, count = self._take(_ARRAY)
        if kind == _STRING_KIND:
            self._claim(count * _LENGTH.size)
            for _ in range(count):
                self._string()
        else:
            self._skip(count * self._size(kind))

    def _tensor(self) -> None:
        self._string()
        (dimensions,) = self._take(_KIND)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        self._skip(dimensions * _LENGTH.size + _KIND.size + _LENGTH.size)

    def _string(self) -> None:
        (length,) = self._take(_LENGTH)
        self._skip(length)

    def _size(self, kind: int) -> int:
        size = _BYTES.get(kind)
        if size is None:
            raise ValueError(f"a value of the unknown kind {kind}, or arrays in arrays")
        return size

    def _take(self, form: struct.Struct) -> tuple[Any, ...]:
        start = self._at
        self._skip(form.size)
        return form.unpack_from(self._data, start)

    def _skip(self, length: int) -> None:
        self._claim(length)
        self._at += length

    def _claim(self, length: int) -> None:
        if length > len(self._data) - self._at:
            raise ValueError("it ends before what its header says")
