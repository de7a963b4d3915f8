"""Block keys: keyed BLAKE3 over everything that changes a block's KV bytes.

key(i) = BLAKE3_keyed(K_blocks; tag, tenant, salt, block size, model digest, adapter
digest, KV dtype and layout version, numerics digest, key(i-1), tokens of block i),
every part length-prefixed. ``K_blocks`` is derived from the cluster's secret for this
purpose alone, so keys can't be computed, probed or made to collide without it.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvtide.kv.header import TAG_BYTES, SpaceTags
from kvtide.kv.ids import KEY_BYTES, BlockKey, TenantId
from kvtide.kv.layout import Layout
from kvtide.kv.model import ModelFacts

_DOMAIN = b"kvtide block key v1"
_NO_PARENT = b""
MIN_SECRET_BYTES = 32


def derive_key(secret: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose (``block identity``, ``capabilities``, ``transfer``).

    BLAKE3's derive_key mode: keys of two purposes tell nothing of one another.

    Raises:
        ValueError: the secret is shorter than ``MIN_SECRET_BYTES``.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the cluster secret needs at least {MIN_SECRET_BYTES} bytes")
    return blake3(secret, derive_key_context=f"kvtide 2026 {purpose}").digest()


def _prefixed(part: bytes) -> bytes:
    return struct.pack("<Q", len(part)) + part


def _tag(key: bytes, *parts: bytes) -> bytes:
    hasher = blake3(key=key)
    for part in (b"kvtide tag v1", *parts):
        hasher.update(_prefixed(part))
    return hasher.digest(length=TAG_BYTES)


def _block_key(secret: bytes, key_id: int) -> bytes:
    return derive_key(secret, f"block identity {key_id}")


def tenant_tag(secret: bytes, tenant: TenantId, *, key_id: int = 0) -> bytes:
    """Whose a block is, whatever the salt: what quotas and removals go by."""
    return _tag(_block_key(secret, key_id), b"owner", tenant.encode())


def model_tag(secret: bytes, facts: ModelFacts, *, key_id: int = 0) -> bytes:
    """Which model's a block is, with the numerics that made it."""
    parts = (facts.digest.encode(), facts.numerics.encode())
    return _tag(_block_key(secret, key_id), b"model", *parts)


@dataclass(frozen=True, slots=True)
class SpaceId:
    """A key space: two requests share blocks only if all of these are equal.

    ``salt`` narrows a tenant's space: requests of one tenant with other salts share
    nothing. It never widens it, for clients choose it. ``adapter`` is the digest of a
    LoRA adapter, empty for none.
    """

    tenant: TenantId
    facts: ModelFacts
    salt: str = ""
    adapter: str = ""


class KeySpace:
    """Makes the chained block keys of one space. Immutable and cheap to keep."""

    def __init__(self, secret: bytes, space: SpaceId, *, key_id: int = 0) -> None:
        """Derive the space's key from the cluster ``secret`` (at least 32 bytes)."""
        facts = space.facts
        self.space = space
        self.layout = Layout.of(facts)
        self._key = _block_key(secret, key_id)
        parts = (
            _DOMAIN,
            space.tenant.encode(),
            space.salt.encode(),
            struct.pack("<I", facts.block_tokens),
            facts.digest.encode(),
            space.adapter.encode(),
            self.layout.canonical(),
            facts.numerics.encode(),
        )
        self._prefix = blake3(key=self._key)
        for part in parts:
            self._prefix.update(_prefixed(part))
        self.tags = SpaceTags(
            key_id=key_id,
            model=model_tag(secret, facts, key_id=key_id),
            layout=_tag(self._key, b"layout", self.layout.canonical()),
            tenant=tenant_tag(secret, space.tenant, key_id=key_id),
        )

    def key(self, parent: BlockKey | None, tokens: Sequence[int]) -> BlockKey:
        """The key of one full block after ``parent`` (None: the first block)."""
        hasher = self._prefix.copy()
        hasher.update(_prefixed(parent if parent is not None else _NO_PARENT))
        ids = array("I", tokens)
        hasher.update(_prefixed(ids.tobytes()))
        return BlockKey(hasher.digest(length=KEY_BYTES))

    def chain(
        self, tokens: Sequence[int], *, parent: BlockKey | None = None
    ) -> tuple[BlockKey, ...]:
        """The keys of all full blocks of ``tokens``; a rest that fills none has none."""
        size = self.layout.block_tokens
        keys: list[BlockKey] = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = self.key(parent, tokens[start : start + size])
            keys.append(parent)
        return tuple(keys)
