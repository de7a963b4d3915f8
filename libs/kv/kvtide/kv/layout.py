"""How a block's bytes lie: a header, then named parts, ``[layer][K,V][token]…``.

Stored bytes are ``[layer][K,V][token][kv_head][head_dim]``, so a part (K or V of one
layer) is contiguous and the same bytes that an engine keeps for that token range.
"""

from dataclasses import dataclass
from enum import IntEnum

from kvtide.kv.model import ModelFacts

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
ALIGN_BYTES = 64
HEADER_FIXED_BYTES = 128
PART_ENTRY_BYTES = 24
MIN_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 512


class PartKind(IntEnum):
    """The two parts that a layer of full attention has."""

    K = 0
    V = 1


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of one model's blocks. All sizes are in bytes unless named tokens.

    Parts are numbered ``layer * 2 + kind``. In a slot the header comes first
    (``header_bytes``), then the parts back to back, each ``part_bytes`` long.
    """

    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    block_tokens: int
    version: int = 1

    def __post_init__(self) -> None:
        """Refuse what no block may be.

        Raises:
            ValueError: an unknown dtype, a size below one, or a block size that is
                not a power of two from 16 to 512.
        """
        if self.kv_dtype not in DTYPE_BYTES:
            raise ValueError(
                f"KV dtype {self.kv_dtype!r} is unknown; use one of {sorted(DTYPE_BYTES)}"
            )
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError("layers, kv_heads and head_dim must be at least 1")
        tokens = self.block_tokens
        if not MIN_BLOCK_TOKENS <= tokens <= MAX_BLOCK_TOKENS or tokens & (tokens - 1):
            raise ValueError(
                f"block size {tokens} must be a power of two from "
                f"{MIN_BLOCK_TOKENS} to {MAX_BLOCK_TOKENS}"
            )

    @classmethod
    def of(cls, facts: ModelFacts) -> "Layout":
        """The layout of a model's blocks."""
        return cls(
            layers=facts.layers,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            kv_dtype=facts.kv_dtype,
            block_tokens=facts.block_tokens,
            version=facts.layout_version,
        )

    @property
    def token_bytes(self) -> int:
        """K or V of one token in one layer."""
        return self.kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    @property
    def parts(self) -> int:
        """Parts in a block."""
        return self.layers * 2

    @property
    def part_bytes(self) -> int:
        """One part of a full block."""
        return self.block_tokens * self.token_bytes

    @property
    def header_bytes(self) -> int:
        """The header, rounded up so that parts start aligned."""
        return _round_up(
            HEADER_FIXED_BYTES + self.parts * PART_ENTRY_BYTES, ALIGN_BYTES
        )

    @property
    def slot_bytes(self) -> int:
        """Header and all parts of a full block."""
        return self.header_bytes + self.parts * self.part_bytes

    def part_index(self, layer: int, kind: PartKind) -> int:
        """The number of a part."""
        return layer * 2 + kind

    def part_offset(self, part: int) -> int:
        """Where part number ``part`` starts, from the start of the slot."""
        return self.header_bytes + part * self.part_bytes

    def blocks(self, tokens: int) -> int:
        """Full blocks in ``tokens`` tokens."""
        return tokens // self.block_tokens

    def canonical(self) -> bytes:
        """The layout as bytes, for digests and tags."""
        return (
            f"v{self.version}/{self.kv_dtype}/l{self.layers}/h{self.kv_heads}"
            f"/d{self.head_dim}/t{self.block_tokens}/[layer][K,V][token][head][dim]"
        ).encode()
