"""What the rest of the system knows of a model: numbers and digests, no weights."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from blake3 import blake3

LAYOUT_VERSION = 1
"""Changes whenever the bytes of a part for the same tokens change their meaning."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model's identity and the numbers that its KV layout is made from.

    Workers compute it when they load the model and publish it in their beats; gateways
    derive block keys from it. Two workers with equal facts may exchange KV bytes.

    Attributes:
        name: what clients call the model.
        digest: hex BLAKE3 of its configuration and of every weight file.
        layers: decoder layers, each with one K and one V part.
        kv_heads: heads of K and V.
        head_dim: numbers in one head.
        kv_dtype: torch's name of the stored number, such as "float32".
        vocab_size: length of a logits vector.
        max_tokens: longest sequence (prompt and generated together).
        eos_token_ids: tokens that end a generation, ascending.
        numerics: canonical text of whatever else changes the stored numbers (compute
            dtype, weight form, attention variant, RoPE settings, engine).
        layout_version: version of the byte order inside a part.
        block_tokens: tokens in a block; one value for a model in a cluster.
        self_contained: KV stays where it was made, so that one node must prefill and
            decode a request, and only its own blocks are of use to it: an engine of
            others behind an agent.
        parent: the model that this is an adapter for, by name; "" for none. Its digest is
            made from both, so that they share no block.
        pictures: prompts may hold pictures. No key depends on it: what a picture adds to
            KV is not in the tokens, and so not in any key that is made of them.
    """

    name: str
    digest: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    vocab_size: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    numerics: str
    layout_version: int = LAYOUT_VERSION
    block_tokens: int = 64
    self_contained: bool = False
    parent: str = ""
    # workers that differ in this alone share all blocks, and serve one model
    pictures: bool = field(default=False, compare=False)

    def adapted(self, name: str, adapter: str) -> "ModelFacts":
        """This model with an adapter, whose content has the digest ``adapter``."""
        both = blake3(f"adapter {adapter} on {self.digest}".encode()).hexdigest()
        return replace(self, name=name, digest=both, parent=self.name)


def most_said(said: Iterable[ModelFacts]) -> ModelFacts | None:
    """What a model is where its workers disagree: what most of them say. None: nobody does.

    Gateways make keys for it and conductors place on it, so both must choose alike.
    """
    votes = Counter(said)
    return max(votes, key=lambda facts: (votes[facts], facts.digest), default=None)
