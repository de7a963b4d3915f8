"""Keys of a foreign engine's blocks: the engine's name for a block, in a space of ours.

An engine hashes the tokens before a block in its own way. That hash is only a name: it
becomes a key through the cluster's secret, together with all that changes the bytes, so
that neither another tenant nor another model, layout or rank can hit or probe it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.connect.gateway_keys import key_in
from kvtide.connect.shape import BlockShape
from kvtide.kv import (
    BlockKey,
    KeySpace,
    Layout,
    ModelFacts,
    SpaceId,
    SpaceTags,
    TenantId,
)

_WORD = 4


@dataclass(frozen=True, slots=True)
class EngineSpace:
    """What must be equal for two engines to share blocks, beside tenant and shape.

    Attributes:
        engine: the engine and its version, such as ``vllm 0.32.0``.
        model: hex digest of the model's configuration and weights.
        numerics: canonical text of what else changes the bytes: dtypes, quantisation,
            attention backend, the order of bytes in a page, tokens in a block, which
            layers' pages a block is.
        place: rank coordinates and cache group, such as ``tp0/2 pp0/1 group0``.
        adopts: names that carry a key (``gateway_keys``) are that key: at one place only.
            The other places make keys of their own from these names, too.
    """

    engine: str
    model: str
    numerics: str
    place: str = ""
    adopts: bool = False


class ForeignSpace:
    """Makes keys in one space. Immutable and cheap to keep."""

    def __init__(
        self,
        secret: bytes,
        engine: EngineSpace,
        shape: BlockShape,
        tenant: TenantId,
        *,
        salt: str = "",
        adapter: str = "",
    ) -> None:
        """``secret`` is the cluster's; ``salt`` narrows, ``adapter`` is a LoRA's digest."""
        layout = shape.layout
        facts = ModelFacts(
            name=engine.engine,
            digest=engine.model,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            kv_dtype=layout.kv_dtype,
            vocab_size=0,
            max_tokens=0,
            eos_token_ids=(),
            numerics=f"foreign/{engine.engine}/{engine.numerics}/{engine.place}",
            layout_version=layout.version,
            block_tokens=layout.block_tokens,
        )
        self._keys = KeySpace(secret, SpaceId(tenant, facts, salt, adapter))
        self._adopts = engine.adopts
        self.shape = shape

    @property
    def tags(self) -> SpaceTags:
        """What each block of the space carries in its header."""
        return self._keys.tags

    @property
    def layout(self) -> Layout:
        """The slots of the space."""
        return self._keys.layout

    def key(self, name: bytes) -> BlockKey:
        """The key of the block that the engine calls ``name``.

        ``name`` must commit to all tokens up to the block's end: it is not chained here.
        """
        given = key_in(name) if self._adopts else None
        if given is not None:
            return given
        padded = len(name).to_bytes(_WORD, "little") + name
        words = array("I")
        words.frombytes(padded.ljust(-(-len(padded) // _WORD) * _WORD, b"\0"))
        return self._keys.key(None, words)

    def keys(self, names: Sequence[bytes]) -> tuple[BlockKey, ...]:
        """``key`` of each."""
        return tuple(map(self.key, names))
