"""The owner's side of one connection whose bytes go by a foreign engine."""

from collections.abc import Sequence

from kvtide.transfer.buffers import copy_and_hash
from kvtide.transfer.engines.slabs import SLAB_BYTES, SLOT_BYTES, SLOTS, Slab, Slabs
from kvtide.transfer.engines.wire import Opened, pack_opened
from kvtide.transfer.errors import Corrupt, OutOfBounds, Refused


class InboundEngine:
    """For the connection's thread; ``slabs`` is None where there is no engine."""

    def __init__(self, slabs: Slabs | None) -> None:
        """Hold nothing yet."""
        self._slabs = slabs
        self._slab: Slab | None = None

    @property
    def name(self) -> str:
        """The engine's, "" without one."""
        return "" if self._slabs is None else self._slabs.engine.name

    def open(self) -> bytes:
        """The answer to ENGINE_OPEN.

        Raises:
            Refused: there is no engine here, or no memory for it.
        """
        if self._slabs is None:
            raise Refused("no transfer engine here")
        if self._slab is None:
            self._slab = self._slabs.take()
        address = self._slab.address
        description = self._slabs.engine.describe(address, SLAB_BYTES)
        return pack_opened(Opened(address, SLAB_BYTES, description))

    def fill(self, slot: int, views: Sequence[memoryview]) -> list[int]:
        """Copy pieces into a slot for the peer to fetch; xxh3 of what lies there."""
        there = self._slot(slot, views)
        digests: list[int] = []
        at = 0
        for view in views:
            end = at + len(view)
            digests.append(copy_and_hash(there[at:end], view, lambda: False))
            at = end
        return digests

    def empty(
        self, slot: int, views: Sequence[memoryview], digests: Sequence[int]
    ) -> None:
        """Copy what the peer wrote into a slot to where it belongs.

        Raises:
            Corrupt: what lies there then is not what was sent.
        """
        there = self._slot(slot, views)
        if len(digests) != len(views):
            raise Refused("checksums of another number of pieces")
        at = 0
        for index, (view, sent) in enumerate(zip(views, digests, strict=True)):
            end = at + len(view)
            if copy_and_hash(view, there[at:end], lambda: False) != sent:
                raise Corrupt("written bytes differ", slice_index=index)
            at = end

    def _slot(self, slot: int, views: Sequence[memoryview]) -> memoryview:
        total = sum(map(len, views))
        if self._slab is None:
            raise Refused("the engine was not opened on this connection")
        if slot >= SLOTS or total > SLOT_BYTES:
            raise OutOfBounds(f"{total} bytes do not fit slot {slot}")
        return self._slab.slot(slot, total)

    def close(self) -> None:
        """The connection is over."""
        slab, self._slab = self._slab, None
        if slab is not None and self._slabs is not None:
            self._slabs.give_back(slab)
