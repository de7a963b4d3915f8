"""Memory of the client's own, in which loaded blocks are verified."""

import threading
from collections.abc import Sequence

import numpy as np

Buffers = Sequence[memoryview]


class Staging:
    """Buffers of one size, kept for the next load. Safe from any thread.

    A load whose answer did not come keeps its buffers for ever: the loop may still write
    into them. The next load gets others.
    """

    def __init__(self, nbytes: int) -> None:
        """``nbytes`` bound what is kept, and what one batch should take."""
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    def take(self, count: int, nbytes: int) -> Buffers:
        """``count`` private buffers of ``nbytes`` each, with any content."""
        taken: list[memoryview] = []
        with self._lock:
            while self._free and len(taken) < count:
                buffer = self._free.pop()
                if buffer.nbytes == nbytes:
                    taken.append(buffer)
        while len(taken) < count:
            taken.append(np.empty(nbytes, np.uint8).data)
        return taken

    def give_back(self, buffers: Buffers) -> None:
        """Nobody writes into these any more."""
        with self._lock:
            held = sum(buffer.nbytes for buffer in self._free)
            for buffer in buffers:
                if held + buffer.nbytes > self.nbytes:
                    return
                held += buffer.nbytes
                self._free.append(buffer)
