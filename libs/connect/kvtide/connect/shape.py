"""How a foreign engine's block is laid into a slot: opaque pieces, never looked into."""

from dataclasses import dataclass

from kvtide.kv import Layout
from kvtide.runtime import ConfigError

FOREIGN_LAYOUT = 1001
"""Versions from here on are of opaque bytes; the pool's own engine stays below."""

PIECE_UNIT_BYTES = 32
MAX_PIECES = 32_767
_BYTE_DTYPE = "float8_e4m3fn"
_UNITS = 16


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block is ``pieces`` runs of ``piece_bytes`` each, such as a page of each layer.

    The pool stores and verifies bytes; what they mean is the engine's affair and part of
    the key (``EngineSpace.numerics``). Each piece is two parts of a slot, so that a
    reader finds a bad half without hashing the whole block again.
    """

    pieces: int
    piece_bytes: int

    def __post_init__(self) -> None:
        """Refuse what no slot can hold.

        Raises:
            ConfigError: no or too many pieces, or a piece that is no multiple of 32.
        """
        if not 1 <= self.pieces <= MAX_PIECES:
            raise ConfigError(
                f"a block of {self.pieces} pieces can't be pooled; 1 to {MAX_PIECES} can",
                key="pieces",
            )
        if self.piece_bytes < PIECE_UNIT_BYTES or self.piece_bytes % PIECE_UNIT_BYTES:
            raise ConfigError(
                f"pieces of {self.piece_bytes} bytes can't be pooled: they must be "
                f"multiples of {PIECE_UNIT_BYTES} bytes",
                key="piece_bytes",
            )

    @property
    def nbytes(self) -> int:
        """All pieces together."""
        return self.pieces * self.piece_bytes

    @property
    def layout(self) -> Layout:
        """The slot: ``2 * pieces`` parts of half a piece, in the order of the pieces."""
        return Layout(
            layers=self.pieces,
            kv_heads=1,
            head_dim=self.piece_bytes // PIECE_UNIT_BYTES,
            kv_dtype=_BYTE_DTYPE,
            block_tokens=_UNITS,
            version=FOREIGN_LAYOUT,
        )

    def cut(self, block: memoryview) -> tuple[memoryview, ...]:
        """The pieces of a block's ``nbytes`` contiguous bytes, as views."""
        size = self.piece_bytes
        return tuple(
            block[start : start + size] for start in range(0, self.nbytes, size)
        )
