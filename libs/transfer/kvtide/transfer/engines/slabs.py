"""The memory that a foreign engine reaches at one end: slots that requests pass through.

A slab belongs to one connection. Slabs are never unmapped before the engine is closed: a
peer that was given up may still reach one, and some engines would then touch memory that
is gone. For the same reason a slab rests before another connection gets it; should bytes
come even later, a checksum is wrong and the request is tried again.
"""

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.runtime import Clock
from kvtide.transfer.buffers import address_of
from kvtide.transfer.engines.seam import Engine, Flight
from kvtide.transfer.errors import Refused
from kvtide.transfer.schedule import DEPTH
from kvtide.transfer.shm import close_mapping

SLOT_BYTES = 1 << 20
"""A request by an engine holds at most this much."""

SLOTS = DEPTH
SLAB_BYTES = SLOTS * SLOT_BYTES
REST_S = 2.0
MOST_SLABS = 256


@dataclass(eq=False, frozen=True, slots=True)
class Slab:
    """Registered memory of ``SLOTS`` slots."""

    mapping: mmap.mmap
    view: memoryview
    address: int

    def slot(self, index: int, length: int) -> memoryview:
        """The first bytes of a slot."""
        start = index * SLOT_BYTES
        return self.view[start : start + length]


class Slabs:
    """All slabs of one endpoint. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        """Of an engine that is open; has none yet."""
        self.engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._all: list[Slab] = []
        self._resting: deque[tuple[float, Slab, Sequence[Flight]]] = deque()

    def take(self) -> Slab:
        """A slab for a connection; to be given back.

        Raises:
            Refused: there are too many, or the engine does not take the memory.
        """
        with self._lock:
            rested = self._rested()
            if rested is not None:
                return rested
            if len(self._all) >= MOST_SLABS:
                raise Refused(
                    f"{MOST_SLABS} connections use {self.engine.name}",
                    path=self.engine.name,
                )
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mapping = mmap.mmap(-1, SLAB_BYTES, flags=flags)
            view = memoryview(mapping)
            slab = Slab(mapping, view, address_of(view))
            # kept whatever comes of it: the engine may know it already
            self._all.append(slab)
            self.engine.register(slab.address, SLAB_BYTES)
            return slab

    def _rested(self) -> Slab | None:
        now_s = self._clock.monotonic()
        for _ in range(len(self._resting)):
            since_s, slab, flights = self._resting.popleft()
            left = [each for each in flights if not each.over()]
            if not left and now_s >= since_s + REST_S:
                return slab
            self._resting.append((since_s, slab, left))
        return None

    def give_back(self, slab: Slab, flights: Sequence[Flight] = ()) -> None:
        """A connection has ended; ``flights`` of ours may still be under way."""
        with self._lock:
            self._resting.append((self._clock.monotonic(), slab, flights))

    def close(self) -> None:
        """Close the engine, then let go of the memory."""
        with self._lock:
            slabs, self._all = self._all, []
            # flights hold their engine
            self._resting.clear()
        self.engine.close()
        for slab in slabs:
            close_mapping(slab.mapping)
