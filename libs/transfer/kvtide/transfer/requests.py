"""Requests on their way to a peer, and the queue in front of one connection."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.transfer.handles import Operation, RegionHandle
from kvtide.transfer.plan import PIECES_PER_REQUEST, Piece, cut, group
from kvtide.transfer.transfer import Transfer


@dataclass(eq=False, slots=True)
class Request:
    """Some pieces of one transfer that go out in one frame.

    ``views[i]`` is the local memory of ``pieces[i]``, ``offsets[i]`` where it is in
    the region of ``handles[i]``. ``location``: see ``schedule.Job``.
    """

    transfer: Transfer
    pieces: Sequence[Piece]
    views: Sequence[memoryview]
    handles: Sequence[RegionHandle]
    offsets: Sequence[int]
    nbytes: int
    path: str = "tcp"
    location: str = ""
    rail: int = -1
    frame_id: int = 0
    settled: bool = False

    @property
    def urgency(self) -> int:
        """See ``schedule.Job``."""
        return int(self.transfer.priority)

    @property
    def writes(self) -> bool:
        """Whether the bytes go out with it."""
        return self.transfer.operation is Operation.WRITE

    def settle(self) -> None:
        """The request touches no memory any more; once."""
        if not self.settled:
            self.settled = True
            self.transfer.settle(self.path)


class Batch(NamedTuple):
    """What a caller asks for: slice i is ``views[i]``, at ``offsets[i]`` of its region."""

    views: Sequence[memoryview]
    handles: Sequence[RegionHandle]
    offsets: Sequence[int]

    def requests(
        self, transfer: Transfer, paths: Sequence[str], limits: tuple[int, int]
    ) -> list[Request]:
        """Cut it; slice i goes by ``paths[i]``. ``limits``: of a piece, of a request.

        Tells ``transfer`` of the slices that are in several pieces.
        """
        piece_bytes, request_bytes = limits
        lengths = [len(view) for view in self.views]
        if sum(lengths) <= request_bytes and 1 <= len(lengths) <= PIECES_PER_REQUEST:
            first = paths[0]
            if len(paths) == 1 or all(path == first for path in paths):
                # the usual case: all of it in one request
                pieces = [Piece(at, 0, length) for at, length in enumerate(lengths)]
                return [self._request(transfer, pieces, first)]
        sides: dict[str, list[Piece]] = {}
        for piece in cut(lengths, piece_bytes):
            index = piece.slice_index
            if piece.start == 0 and piece.length < lengths[index]:
                transfer.split(index, self.views[index])
            sides.setdefault(paths[index], []).append(piece)
        return [
            self._request(transfer, pieces, path)
            for path, side in sides.items()
            for pieces in group(side, request_bytes=request_bytes)
        ]

    def _request(
        self, transfer: Transfer, pieces: Sequence[Piece], path: str
    ) -> Request:
        views: list[memoryview] = []
        nbytes = 0
        for index, start, length in pieces:
            view = self.views[index]
            whole = len(view) == length
            views.append(view if whole else view[start : start + length])
            nbytes += length
        return Request(
            transfer,
            pieces,
            views,
            [self.handles[piece.slice_index] for piece in pieces],
            [self.offsets[piece.slice_index] + piece.start for piece in pieces],
            nbytes,
            path,
        )


class Inbox:
    """What goes out next on one connection. Thread-safe."""

    def __init__(self) -> None:
        """Start empty and open."""
        self._lock = threading.Lock()
        self._requests: deque[Request] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._requests)

    def put(self, request: Request) -> bool:
        """Add one; False, and nothing added, when closed."""
        with self._lock:
            if not self._closed:
                self._requests.append(request)
            return not self._closed

    def take(self) -> Request | None:
        """The next, if there is one."""
        with self._lock:
            return self._requests.popleft() if self._requests else None

    def discard(self, transfer: Transfer | None) -> list[Request]:
        """Take out all requests of a transfer (None: all)."""
        with self._lock:
            out = [r for r in self._requests if transfer in (None, r.transfer)]
            for request in out:
                self._requests.remove(request)
        return out

    def close(self) -> None:
        """Accept no more."""
        with self._lock:
            self._closed = True


def in_loop() -> bool:
    """Whether an event loop runs in the calling thread: it must not be held up."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
