"""Blocks whose engine knows them by a name and an address: read and written in place."""

from collections.abc import Sequence

from kvtide.connect.client import EngineClient, Pieces
from kvtide.connect.space import ForeignSpace
from kvtide.kv import BlockKey
from kvtide.transfer.buffers import memory_at


class OpaquePages:
    """Moves blocks by name between the pool and addresses, for one space.

    A block is ``space.shape.pieces`` addresses in a row, each the start of a piece.
    """

    def __init__(self, client: EngineClient, space: ForeignSpace) -> None:
        """For blocks of one shape and owner."""
        self._client = client
        self.space = space

    def exists(self, names: Sequence[str]) -> int:
        """How many, from the first on, are in the pool."""
        return self._client.exists(self._keys(names))

    def load(self, names: Sequence[str], addresses: Sequence[int]) -> list[bool]:
        """Overwrite those that can be had; the others' memory is left as it is.

        Raises:
            ValueError: the addresses are not ``pieces`` for each name.
        """
        self._check(names, addresses)

        def deliver(i: int, pieces: Pieces) -> None:
            for target, piece in zip(self._memory(i, addresses), pieces, strict=True):
                target[:] = piece

        return list(self._client.load(self.space, self._keys(names), deliver))

    def save(self, names: Sequence[str], addresses: Sequence[int]) -> bool:
        """Offer blocks; whether all of them are in the pool now or were before.

        Raises:
            ValueError: the addresses are not ``pieces`` for each name.
        """
        self._check(names, addresses)
        saved = self._client.save(
            self.space, self._keys(names), lambda i: self._memory(i, addresses)
        )
        return saved == len(names)

    def _keys(self, names: Sequence[str]) -> tuple[BlockKey, ...]:
        return self.space.keys([name.encode() for name in names])

    def _memory(self, i: int, addresses: Sequence[int]) -> list[memoryview]:
        shape = self.space.shape
        own = addresses[i * shape.pieces : (i + 1) * shape.pieces]
        return [memory_at(address, shape.piece_bytes) for address in own]

    def _check(self, names: Sequence[str], addresses: Sequence[int]) -> None:
        wanted = len(names) * self.space.shape.pieces
        if len(addresses) != wanted:
            raise ValueError(
                f"{len(addresses)} addresses for {wanted} pieces of {len(names)} blocks"
            )
