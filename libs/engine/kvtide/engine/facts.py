"""What the rest of the system must know of a model; imports no torch."""

from dataclasses import dataclass

LAYOUT_VERSION = 1
"""Changes whenever the bytes of a part for the same tokens change their meaning."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model's identity and the numbers that its KV layout is made from.

    Two workers whose facts are equal may exchange KV bytes.

    Attributes:
        name: what clients call the model.
        digest: hex BLAKE3 of config.json and of every weight file.
        layers: decoder layers, each with one K and one V part.
        kv_heads: heads of K and V.
        head_dim: numbers in one head.
        kv_dtype: torch's name of the stored number, such as "float32".
        kv_dtype_bytes: bytes of one stored number.
        vocab_size: length of a logits vector.
        max_tokens: longest sequence (prompt and generated together).
        eos_token_ids: tokens that end a generation, ascending.
        numerics: canonical text of whatever else changes the stored numbers.
        layout_version: version of the byte order inside a part.
    """

    name: str
    digest: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    kv_dtype_bytes: int
    vocab_size: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    numerics: str
    layout_version: int = LAYOUT_VERSION

    @property
    def token_part_bytes(self) -> int:
        """Bytes of one token in one part: K or V of one layer."""
        return self.kv_heads * self.head_dim * self.kv_dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all 2 * layers parts."""
        return 2 * self.layers * self.token_part_bytes
