"""Names of an engine's blocks by which gateways and conductors know them, too. Pure.

A gateway derives a prompt's block keys from its tokens. Where an engine serves as a
worker its blocks get those very keys, so that the index which the conductor places by
has them: a hit, a hot prefix, a copy are then what they are for every other worker. An
engine's own hash can't be that key, for a gateway does not know how it is made.
"""

from collections.abc import Sequence
from typing import Any, Final, overload

from kvtide.kv import BlockKey, KeySpace

_MARK: Final = b"kvtide key\0"


def name_of(key: BlockKey) -> bytes:
    """The name of a block whose key is this one."""
    return _MARK + key


def key_in(name: bytes) -> BlockKey | None:
    """The key in a name that ``name_of`` made; None: it is an engine's hash."""
    return BlockKey(name[len(_MARK) :]) if name.startswith(_MARK) else None


class GatewayNames(Sequence[bytes]):
    """The names of one request's full blocks. Grows as ``hashes`` does.

    ``hashes`` is the engine's own list, one for each ``hash_tokens`` tokens; ``tokens``
    are the request's so far, a live view. Both are the caller's. Where no block of the
    gateways' ends, which have more tokens then, the name is the engine's hash.
    """

    def __init__(
        self,
        space: KeySpace,
        tokens: Sequence[int],
        hashes: Sequence[bytes],
        hash_tokens: int,
    ) -> None:
        """Nothing is hashed before it is asked for."""
        self._space = space
        self._tokens = tokens
        self._hashes = hashes
        self._hash_tokens = hash_tokens
        self._keys: list[BlockKey] = []

    def __len__(self) -> int:
        """Full blocks."""
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """As of any sequence."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        size = self._space.layout.block_tokens
        full, rest = divmod((at + 1) * self._hash_tokens, size)
        if rest:
            return bytes(self._hashes[at])
        while len(self._keys) < full:
            start = len(self._keys) * size
            parent = self._keys[-1] if self._keys else None
            tokens: Any = self._tokens[start : start + size]
            self._keys.append(self._space.key(parent, tokens))
        return name_of(self._keys[full - 1])
