"""Moves requests through shared memory: a private copy, hashed in the same pass."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from kvtide.transfer.buffers import copy_and_hash
from kvtide.transfer.errors import TransferError, Unreachable
from kvtide.transfer.handles import RegionHandle
from kvtide.transfer.mappings import Mappings
from kvtide.transfer.plan import Piece
from kvtide.transfer.regions import check_range
from kvtide.transfer.requests import Request, in_loop
from kvtide.transfer.transfer import Transfer

log = logging.getLogger("kvtide.transfer")

AT_ONCE_BYTES = 64 << 10
"""So little is copied sooner than another thread is woken, also in an event loop."""

AT_ONCE_IN_THREAD_BYTES = 16 << 20
"""A thread without a loop would only wait: it copies as much as this by itself."""


class Mover(Protocol):
    """Reaches a peer's regions from this process, without the peer."""

    @property
    def path(self) -> str:
        """The transport's name."""
        ...

    def reaches(self, handle: RegionHandle, *, writable: bool) -> bool:
        """Whether it does; may ask the owner, and raises what the owner answers."""
        ...

    def known(self, handle: RegionHandle, *, writable: bool) -> bool:
        """Whether ``move`` would be done as soon as a copy."""
        ...

    def move(self, request: Request, at: int, piece: Piece) -> int:
        """Move a piece; its xxh3_64. Raises a ``TransferError``."""
        ...

    def forget(self, region: int) -> None:
        """The owner took the region back."""
        ...

    def close(self) -> None:
        """Let go of all."""
        ...


class SharedMover:
    """Copies from and to shared memory."""

    path = "shm"

    def __init__(self, mappings: Mappings) -> None:
        """Reach what ``mappings`` maps."""
        self._mappings = mappings

    def reaches(self, handle: RegionHandle, *, writable: bool) -> bool:
        """See ``Mover``: by its name it does."""
        del handle, writable
        return True

    def known(self, handle: RegionHandle, *, writable: bool) -> bool:
        """See ``Mover``."""
        return self._mappings.known(handle, writable=writable)

    def move(self, request: Request, at: int, piece: Piece) -> int:
        """See ``Mover``."""
        memory = self._mappings.view(request.handles[at], writable=request.writes)
        # the mapping's length is the owner's word, the handle's is the caller's
        start = request.offsets[at]
        check_range(start, piece.length, len(memory), piece.slice_index)
        there = memory[start : start + piece.length]
        here = request.views[at]
        target, source = (there, here) if request.writes else (here, there)
        transfer = request.transfer
        return copy_and_hash(target, source, lambda: transfer.failed)

    def forget(self, region: int) -> None:
        """See ``Mover``."""
        self._mappings.forget(region)

    def close(self) -> None:
        """See ``Mover``."""
        self._mappings.close()


class Copier:
    """Gives requests of one peer to a mover, in threads. Thread-safe.

    What the mover does not reach goes ``elsewhere``.
    """

    def __init__(
        self,
        mover: Mover,
        threads: Executor,
        node: str,
        elsewhere: Callable[[Request], None],
    ) -> None:
        """Copy in ``threads``."""
        self.mover = mover
        self._threads = threads
        self._node = node
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        self._waiting: dict[Request, Future[None]] = {}
        self._end: TransferError | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; each is settled in the end. Never blocks an event loop."""
        if self._is_little(requests):
            for request in requests:
                self._copy(request)
            return
        for request in requests:
            try:
                with self._lock:
                    future = self._threads.submit(self._take, request)
                    self._waiting[request] = future
            except RuntimeError:
                # the endpoint is closed, and its threads with it
                request.transfer.fail(
                    Unreachable("closed", node=self._node, path=self.mover.path)
                )
                request.settle()

    def help(self, transfer: Transfer) -> None:
        """Copy for a transfer in the calling thread, which waits for it."""
        while True:
            with self._lock:
                mine = (r for r in self._waiting if r.transfer is transfer)
                request = next(mine, None)
                if request is None:
                    return
                future = self._waiting.pop(request)
            if future.cancel():
                self._copy(request)

    def close(self, error: TransferError) -> None:
        """End all; copies under way end by themselves."""
        self._end = error
        self.mover.close()

    def _is_little(self, requests: Sequence[Request]) -> bool:
        nbytes = sum(request.nbytes for request in requests)
        limit = AT_ONCE_BYTES if in_loop() else AT_ONCE_IN_THREAD_BYTES
        return nbytes <= limit and all(
            self.mover.known(handle, writable=request.writes)
            for request in requests
            for handle in request.handles
        )

    def _take(self, request: Request) -> None:
        with self._lock:
            self._waiting.pop(request, None)
        self._copy(request)

    def _copy(self, request: Request) -> None:
        try:
            if not self._reaches_all(request):
                self._elsewhere(request)
                return
            for at, piece in enumerate(request.pieces):
                if not self._copy_piece(request, at, piece):
                    break
        except TransferError as error:
            error.path = self.mover.path
            request.transfer.fail(error)
        except BaseException as error:
            log.exception("copying failed")
            request.transfer.fail(TransferError(repr(error), path=self.mover.path))
            request.settle()
            raise
        request.settle()

    def _reaches_all(self, request: Request) -> bool:
        for at, handle in enumerate(request.handles):
            try:
                if not self.mover.reaches(handle, writable=request.writes):
                    return False
            except TransferError as error:
                error.slice_index = request.pieces[at].slice_index
                raise
        return True

    def _copy_piece(self, request: Request, at: int, piece: Piece) -> bool:
        transfer = request.transfer
        if self._end is not None:
            transfer.fail(self._end)
        if transfer.failed:
            return False
        if transfer.remaining_s() <= 0:
            transfer.expire()
            return False
        try:
            digest = self.mover.move(request, at, piece)
        except TransferError as error:
            error.slice_index = piece.slice_index
            raise
        transfer.moved(piece, digest)
        return not transfer.failed
