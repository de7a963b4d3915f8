"""Requests on their way to a peer, and the queue in front of one connection."""

import threading
from asyncio import _get_running_loop as _running_loop  # pyright: ignore[reportPrivateUsage]
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, attrgetter
from typing import NamedTuple

from kvtide.transfer.buffers import plain_view
from kvtide.transfer.handles import Operation, ReadSlice, RegionHandle, WriteSlice
from kvtide.transfer.plan import PIECES_PER_REQUEST, Piece, cut, group
from kvtide.transfer.regions import check_range
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.wire import Ask, check_handle

_form_of = attrgetter("format", "ndim", "c_contiguous")
_PLAIN = {("B", 1, True)}


@dataclass(eq=False, slots=True)
class Request:
    """Some pieces of one transfer that go out in one frame.

    ``views[i]`` is the local memory of ``pieces[i]``, ``offsets[i]`` where it is in
    the region of ``handles[i]``. ``cuts`` are the pieces, None when they are all slices
    of the transfer, each whole. ``location`` and ``least_tier``: see ``schedule.Job``. ``lanes``: see ``wire.Ask``.
    """

    transfer: Transfer
    cuts: Sequence[Piece] | None
    views: Sequence[memoryview]
    handles: Sequence[RegionHandle]
    offsets: Sequence[int]
    nbytes: int
    path: str = "tcp"
    location: str = ""
    least_tier: int = 0
    rail: int = -1
    frame_id: int = 0
    lanes: Sequence[bytes] = ()
    settled: bool = False

    @property
    def pieces(self) -> Sequence[Piece]:
        """Which range of which slice each view is."""
        if self.cuts is not None:
            return self.cuts
        return [Piece(at, 0, len(view)) for at, view in enumerate(self.views)]

    @property
    def urgency(self) -> int:
        """See ``schedule.Job``."""
        return int(self.transfer.priority)

    @property
    def writes(self) -> bool:
        """Whether the bytes go out with it."""
        return self.transfer.operation is Operation.WRITE

    def slice_index(self, at: int) -> int:
        """Which slice ``views[at]`` belongs to."""
        return at if self.cuts is None else self.cuts[at].slice_index

    def moved(self, xxh3: Sequence[int]) -> None:
        """All of it has been moved; the checksums of its pieces."""
        if self.cuts is None:
            self.transfer.moved_all(xxh3)
            return
        for piece, value in zip(self.cuts, xxh3, strict=True):
            self.transfer.moved(piece, value)

    def ask(self) -> Ask:
        """What the owner is asked for."""
        grants: dict[tuple[int, bytes], int] = {}
        pieces: list[tuple[int, int, int]] = []
        for view, handle, offset in zip(
            self.views, self.handles, self.offsets, strict=True
        ):
            right = (handle.region, handle.capability)
            pieces.append((grants.setdefault(right, len(grants)), offset, len(view)))
        transfer = self.transfer
        trace, lanes = transfer.trace, self.lanes
        return Ask(list(grants), pieces, transfer.purpose, trace, lanes)

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
    nbytes: int

    def requests(
        self, transfer: Transfer, paths: Sequence[str], limits: tuple[int, int]
    ) -> list[Request]:
        """Cut it; slice i goes by ``paths[i]``. ``limits``: of a piece, of a request.

        Tells ``transfer`` of the slices that are in several pieces.
        """
        piece_bytes, request_bytes = limits
        views = self.views
        count = len(views)
        if self.nbytes <= request_bytes and 1 <= count <= PIECES_PER_REQUEST:
            first = paths[0]
            if paths.count(first) == count:
                # the usual case: all of it in one request
                handles, offsets = self.handles, self.offsets
                nbytes = self.nbytes
                return [Request(transfer, None, views, handles, offsets, nbytes, first)]
        sides: dict[str, list[Piece]] = {}
        lengths = list(map(len, views))
        for piece in cut(lengths, piece_bytes):
            index = piece.slice_index
            if piece.start == 0 and piece.length < lengths[index]:
                transfer.split(index, views[index])
            sides.setdefault(paths[index], []).append(piece)
        return [
            self._request(transfer, pieces, path)
            for path, side in sides.items()
            for pieces in group(side, request_bytes=request_bytes)
        ]

    def _request(
        self, transfer: Transfer, pieces: Sequence[Piece], path: str
    ) -> Request:
        return Request(
            transfer,
            pieces,
            [self.views[index][start : start + n] for index, start, n in pieces],
            [self.handles[piece.slice_index] for piece in pieces],
            [self.offsets[piece.slice_index] + piece.start for piece in pieces],
            sum(piece.length for piece in pieces),
            path,
        )


def batch_of(
    slices: Sequence[ReadSlice] | Sequence[WriteSlice], node: str, epoch: int
) -> Batch:
    """What the slices ask of a peer, checked against their handles.

    Raises:
        OutOfBounds: memory is not contiguous, or a range is outside its region.
        AccessDenied, StaleEpoch: a handle is not of this process of the peer.
    """
    plain = _plain_batch(slices, node, epoch) if len(slices) > 1 else None
    if plain is not None:
        return plain
    views: list[memoryview] = []
    handles: list[RegionHandle] = []
    offsets: list[int] = []
    nbytes = 0
    checked: RegionHandle | None = None
    for index, (handle, offset, memory) in enumerate(slices):
        view = plain_view(memory, slice_index=index)
        length = len(view)
        if handle is not checked:
            check_handle(handle, node, epoch, index)
            checked = handle
        if offset < 0 or length > handle.length - offset:
            check_range(offset, length, handle.length, index)
        nbytes += length
        views.append(view)
        handles.append(handle)
        offsets.append(offset)
    return Batch(views, handles, offsets, nbytes)


def _plain_batch(
    slices: Sequence[ReadSlice] | Sequence[WriteSlice], node: str, epoch: int
) -> Batch | None:
    """``batch_of`` where nothing is to be said of any slice; else None.

    Hundreds of small slices of one region are usual: no call in Python for each.
    """
    handles, offsets, views = zip(*slices, strict=True)
    handle = handles[0]
    lone = len(set(map(id, handles))) == 1
    known = set(map(type, views)) == {memoryview} and set(map(type, offsets)) == {int}
    if not lone or not known or set(map(_form_of, views)) != _PLAIN:
        return None
    lengths = tuple(map(len, views))
    if min(offsets) < 0 or max(map(add, offsets, lengths)) > handle.length:
        return None
    check_handle(handle, node, epoch, 0)
    return Batch(views, handles, offsets, sum(lengths))


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

    def is_all(self, request: Request) -> bool:
        """Whether it is the only one that waits."""
        with self._lock:
            return len(self._requests) == 1 and self._requests[0] is request

    def take(self) -> Request | None:
        """The next, if there is one."""
        # what comes a moment later is heard of by other means
        if not self._requests:
            return None
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
    return _running_loop() is not None
