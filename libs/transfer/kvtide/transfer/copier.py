"""Moves requests through shared memory: a private copy, hashed in the same pass."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from kvtide.transfer.buffers import copy_and_hash
from kvtide.transfer.errors import TransferError, Unreachable
from kvtide.transfer.mappings import Mappings
from kvtide.transfer.plan import Piece
from kvtide.transfer.regions import check_range
from kvtide.transfer.requests import Request
from kvtide.transfer.transfer import Transfer

log = logging.getLogger("kvtide.transfer")

PATH = "shm"
AT_ONCE_BYTES = 64 << 10
"""So little is copied sooner than another thread is woken."""


class Copier:
    """Of one peer on this host. Thread-safe."""

    def __init__(self, mappings: Mappings, threads: Executor, node: str) -> None:
        """Copy in ``threads``."""
        self.mappings = mappings
        self._threads = threads
        self._node = node
        self._lock = threading.Lock()
        self._waiting: dict[Request, Future[None]] = {}
        self._end: TransferError | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; each is settled in the end. Never blocks."""
        if len(requests) == 1 and self._is_little(requests[0]):
            self._copy(requests[0])
            return
        for request in requests:
            try:
                with self._lock:
                    future = self._threads.submit(self._take, request)
                    self._waiting[request] = future
            except RuntimeError:
                # the endpoint is closed, and its threads with it
                request.transfer.fail(Unreachable("closed", node=self._node, path=PATH))
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
        self.mappings.close()

    def _is_little(self, request: Request) -> bool:
        return request.nbytes <= AT_ONCE_BYTES and all(
            self.mappings.known(handle, writable=request.writes)
            for handle in request.handles
        )

    def _take(self, request: Request) -> None:
        with self._lock:
            self._waiting.pop(request, None)
        self._copy(request)

    def _copy(self, request: Request) -> None:
        try:
            for at, piece in enumerate(request.pieces):
                if not self._copy_piece(request, at, piece):
                    break
        except TransferError as error:
            error.path = PATH
            request.transfer.fail(error)
        except BaseException as error:
            log.exception("copying failed")
            request.transfer.fail(TransferError(repr(error), path=PATH))
            raise
        finally:
            request.settle()

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
            memory = self.mappings.view(request.handles[at], writable=request.writes)
            # the mapping's length is the owner's word, the handle's is the caller's
            start = request.offsets[at]
            check_range(start, piece.length, len(memory), piece.slice_index)
        except TransferError as error:
            error.slice_index = piece.slice_index
            raise
        there = memory[start : start + piece.length]
        here = request.views[at]
        target, source = (there, here) if request.writes else (here, there)
        digest = copy_and_hash(target, source, lambda: transfer.failed)
        transfer.moved(piece, digest)
        return not transfer.failed
