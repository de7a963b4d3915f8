"""A log of requests that says how they load a cluster and nothing of what they say.

A line of JSON for each request: when it came, how long prompt and answer were, and an id
for each full block of the prompt, equal for equal beginnings. The form is that of the
public traces with the block size added, so ``kvtide plan`` and ``kvtide sim`` read it.

An id is a keyed hash of a block's key, under a key derived from the cluster's secret for
this alone: without the secret an id can't be tied to a text, nor to a block in the pool;
with the same secret all gateways give equal ids, so their logs may be joined.
"""

from collections.abc import Sequence

import msgspec
from blake3 import blake3

from kvtide.kv.ids import BlockKey
from kvtide.kv.keys import derive_key

_ID_BYTES = 8
_ID_BITS = 63
_PURPOSE = "workload log"
_ENCODER = msgspec.json.Encoder()


class LoggedRequest(msgspec.Struct, frozen=True):
    """A line. ``timestamp`` in ms, of arrival; lengths in tokens.

    ``hash_ids`` are of the prompt's full blocks of ``block_tokens`` tokens, in order.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int
    model: str

    def line(self) -> bytes:
        """As it is written, with the line's end."""
        return _ENCODER.encode(self) + b"\n"


class BlockIds:
    """Names blocks for a log. Immutable."""

    def __init__(self, secret: bytes) -> None:
        """``secret`` is the cluster's.

        Raises:
            ValueError: it is too short.
        """
        self._key = derive_key(secret, _PURPOSE)

    def of(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """An id below 2**63 for each key."""
        return tuple(self._id(key) for key in keys)

    def _id(self, key: BlockKey) -> int:
        digest = blake3(key, key=self._key).digest(length=_ID_BYTES)
        return int.from_bytes(digest, "little") & ((1 << _ID_BITS) - 1)
