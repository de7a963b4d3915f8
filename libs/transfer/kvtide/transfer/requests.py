"""The requests of one peer that wait for a connection, foreground first."""

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.transfer.handles import Operation, RegionHandle
from kvtide.transfer.plan import Piece
from kvtide.transfer.transfer import Transfer


@dataclass(eq=False, slots=True)
class Request:
    """Some pieces of one transfer that go out in one frame.

    ``views[i]`` is the local memory of ``pieces[i]``, ``offsets[i]`` where it is in
    the region of ``handles[i]``.
    """

    transfer: Transfer
    pieces: Sequence[Piece]
    views: Sequence[memoryview]
    handles: Sequence[RegionHandle]
    offsets: Sequence[int]
    path: str = "tcp"
    frame_id: int = 0
    settled: bool = field(default=False)

    @property
    def writes(self) -> bool:
        """Whether the bytes go out with it."""
        return self.transfer.operation is Operation.WRITE

    def settle(self) -> None:
        """The request touches no memory any more; once."""
        if not self.settled:
            self.settled = True
            self.transfer.settle(self.path)


class RequestQueue:
    """Thread-safe; whoever takes a request must settle it or put it back."""

    def __init__(self) -> None:
        """Start empty and open."""
        self._changed = threading.Condition()
        self._heap: list[tuple[int, int, Request]] = []
        self._count = 0
        self._idle = 0
        self._closed = False

    def put(self, requests: Sequence[Request]) -> bool:
        """Add requests; False, and nothing added, when the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            for request in requests:
                self._count += 1
                priority = int(request.transfer.priority)
                heapq.heappush(self._heap, (priority, self._count, request))
            self._changed.notify(len(requests))
        return True

    def starving(self) -> bool:
        """Whether requests wait and no taker does."""
        with self._changed:
            return len(self._heap) > self._idle

    def take(self, *, wait: bool) -> Request | None:
        """The next request; None when there is none (not ``wait``) or it is closed."""
        with self._changed:
            self._idle += 1
            while wait and not self._heap and not self._closed:
                self._changed.wait()
            self._idle -= 1
            if not self._heap:
                return None
            return heapq.heappop(self._heap)[2]

    def discard(self, transfer: Transfer) -> list[Request]:
        """Take out all requests of a transfer."""
        with self._changed:
            mine = [each[2] for each in self._heap if each[2].transfer is transfer]
            if mine:
                self._heap = [e for e in self._heap if e[2].transfer is not transfer]
                heapq.heapify(self._heap)
        return mine

    def close(self) -> list[Request]:
        """Refuse more, wake all takers, and give what was left."""
        with self._changed:
            self._closed = True
            left = [each[2] for each in self._heap]
            self._heap = []
            self._changed.notify_all()
        return left
