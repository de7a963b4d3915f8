"""Moves requests through shared memory: a private copy, hashed in the same pass."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from operator import add
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kvtide.transfer.buffers import copy_and_hash
from kvtide.transfer.detours import Detours
from kvtide.transfer.errors import Refused, TransferError, Unreachable
from kvtide.transfer.handles import RegionHandle
from kvtide.transfer.lone import SMALL_BYTES
from kvtide.transfer.mappings import Mappings, NotMappedError
from kvtide.transfer.regions import check_range
from kvtide.transfer.requests import Request, in_loop
from kvtide.transfer.shm import Attached, unbacked
from kvtide.transfer.transfer import Transfer

log = logging.getLogger("kvtide.transfer")

AT_ONCE_BYTES = 64 << 10
"""So little is copied sooner than another thread is woken, also in an event loop."""

TINY_BYTES = 16 << 10
"""Pieces up to this size on average are gathered by the kernel, all in one call. Its copy
was seen at 0.65 of the speed of one in this process, which is worth it for tiny ones only."""

LOOK_EVERY = 32
"""Small pieces are copied between two looks at whether that is still wanted."""

_MOST_SPREAD = 16

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

    def asked(self, handle: RegionHandle, *, writable: bool) -> bool:
        """Whether the owner need not be asked any more."""
        ...

    def ask(self, handle: RegionHandle, *, writable: bool) -> None:
        """Ask the owner; blocks. Raises a ``TransferError`` if it does not allow it."""
        ...

    def move(self, request: Request, *, alone: bool) -> Sequence[int]:
        """Move all of a request; xxh3_64 of its pieces, fewer if it became hopeless.

        ``alone``: the calling thread has nobody to let run meanwhile. Raises a
        ``TransferError`` that says which slice it is about.
        """
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

    def __init__(self, mappings: Mappings, detours: Detours) -> None:
        """Reach what ``mappings`` maps; the rest is put into ``detours``."""
        self._mappings = mappings
        self.detours = detours

    def reaches(self, handle: RegionHandle, *, writable: bool) -> bool:
        """See ``Mover``."""
        if self._mappings.at_hand(handle, writable=writable) is not None:
            return True
        if (handle, writable) in self.detours:
            return False
        try:
            self._mappings.reach(handle, writable=writable)
        except NotMappedError as error:
            self.detours.add(handle.region, writes=writable, reason=error)
            return False
        return True

    def known(self, handle: RegionHandle, *, writable: bool) -> bool:
        """See ``Mover``."""
        return self._mappings.known(handle, writable=writable)

    def asked(self, handle: RegionHandle, *, writable: bool) -> bool:
        """See ``Mover``."""
        known = self._mappings.known(handle, writable=writable)
        return known or (handle, writable) in self.detours

    def ask(self, handle: RegionHandle, *, writable: bool) -> None:
        """See ``Mover``; what can't be mapped goes elsewhere, which is no error."""
        self.reaches(handle, writable=writable)

    def move(self, request: Request, *, alone: bool) -> Sequence[int]:
        """See ``Mover``."""
        if not request.writes and len(request.views) > 1:
            found = None if alone else self._read_run(request)
            if found is None:
                found = self._read_many(request)
            if found is not None:
                return found
        return self._move_each(request)

    def _move_each(self, request: Request) -> list[int]:
        writes, hopeless = request.writes, request.transfer.hopeless
        digests: list[int] = []
        known: RegionHandle | None = None
        attached: Attached | None = None
        sure = False
        places = zip(request.views, request.handles, request.offsets, strict=True)
        for here, handle, start in places:
            if attached is None or handle is not known:
                attached = self._reach(request, len(digests))
                sure = known is None and _is_there(request, attached)
                known = handle
            memory = attached.view
            end = start + len(here)
            if end > len(memory):
                # the mapping's length is the owner's word, the handle's is the caller's
                index = request.slice_index(len(digests))
                check_range(start, len(here), len(memory), index)
            if not sure and not attached.backed(start, len(here), write=writes):
                raise unbacked(len(here), request.slice_index(len(digests)))
            there = memory[start:end]
            target, source = (there, here) if writes else (here, there)
            if len(here) <= SMALL_BYTES:
                target[:] = source
                digests.append(xxh3_64_intdigest(target))
                if len(digests) % LOOK_EVERY == 0 and hopeless():
                    break
            else:
                digests.append(copy_and_hash(target, source, hopeless))
                if hopeless():
                    break
        return digests

    def _read_run(self, request: Request) -> list[int] | None:
        """Tiny pieces that lie side by side, in one call that lets others run.

        None when they do not.
        """
        views, offsets = request.views, request.offsets
        if request.nbytes > len(views) * TINY_BYTES:
            return None
        ends = tuple(map(add, offsets, map(len, views)))
        if ends[:-1] != tuple(offsets[1:]) or len(_distinct(request.handles)) > 1:
            return None
        memory = self._reach(request, 0)
        if ends[-1] > len(memory.view):
            return None
        if os.preadv(memory.fd, views, offsets[0]) != request.nbytes:
            return None
        return list(map(xxh3_64_intdigest, views))

    def _read_many(self, request: Request) -> list[int] | None:
        """Small pieces of one region: no step in Python for each but the two at its bytes.

        None where they are not, or where something is to be looked at or to be said.
        """
        views, offsets = request.views, request.offsets
        if request.nbytes > len(views) * SMALL_BYTES or not _alike(request.handles):
            return None
        memory = self._reach(request, 0)
        ends = tuple(map(add, offsets, map(len, views)))
        first, last = min(offsets), max(ends)
        if last > len(memory.view) or last - first > _MOST_SPREAD * request.nbytes:
            return None
        if not memory.present(first, last - first):
            return None
        sources = map(memory.view.__getitem__, map(slice, offsets, ends))
        digests: list[int] = []
        for view, source in zip(views, sources, strict=True):
            view[:] = source
            digests.append(xxh3_64_intdigest(view))
            if len(digests) % LOOK_EVERY == 0 and request.transfer.hopeless():
                break
        return digests

    def _reach(self, request: Request, at: int) -> Attached:
        try:
            return self._mappings.reach(request.handles[at], writable=request.writes)
        except TransferError as error:
            error.slice_index = request.slice_index(at)
            raise

    def forget(self, region: int) -> None:
        """See ``Mover``."""
        self.detours.forget(region)
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
        asking: Executor,
        node: str,
        elsewhere: Callable[[Request], None],
    ) -> None:
        """Copy in ``threads``; ``asking`` waits for this peer's answers alone."""
        self.mover = mover
        self._threads = threads
        self._asking = asking
        self._node = node
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        self._waiting: dict[Request, Future[None]] = {}
        self._end: TransferError | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; each is settled in the end. Never blocks an event loop."""
        if self._is_little(requests):
            for request in requests:
                self._copy(request, alone=True)
            return
        for request in requests:
            if self._all_asked(request):
                self._queue(request, self._threads, self._take)
            else:
                # a peer that does not answer must not keep the others' copies waiting
                self._queue(request, self._asking, self._ask)

    def _queue(
        self, request: Request, threads: Executor, work: Callable[[Request], None]
    ) -> None:
        try:
            with self._lock:
                self._waiting[request] = threads.submit(work, request)
        except Refused as error:
            # too many wait: it is not begun
            request.transfer.fail(error)
            request.settle()
        except RuntimeError:
            # the peer or the endpoint is closed, and its threads with it
            request.transfer.fail(
                Unreachable("closed", node=self._node, path=self.mover.path)
            )
            request.settle()

    @property
    def busy(self) -> bool:
        """Whether some wait for a thread."""
        return bool(self._waiting)

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
                self._copy(request, alone=True)

    def close(self, error: TransferError) -> None:
        """End all; copies under way end by themselves."""
        self._end = error
        self.mover.close()

    def _is_little(self, requests: Sequence[Request]) -> bool:
        nbytes = sum(request.nbytes for request in requests)
        if nbytes > AT_ONCE_IN_THREAD_BYTES or (nbytes > AT_ONCE_BYTES and in_loop()):
            return False
        return all(
            self.mover.known(handle, writable=request.writes)
            for request in requests
            for handle in _distinct(request.handles)
        )

    def _all_asked(self, request: Request) -> bool:
        return all(
            self.mover.asked(handle, writable=request.writes)
            for handle in _distinct(request.handles)
        )

    def _ask(self, request: Request) -> None:
        with self._lock:
            self._waiting.pop(request, None)
        transfer = request.transfer
        try:
            if self._end is not None:
                transfer.fail(self._end)
            for at, handle in enumerate(_distinct(request.handles)):
                if transfer.hopeless():
                    break
                self._ask_for(request, at, handle)
        except TransferError as error:
            error.path = self.mover.path
            transfer.fail(error)
        except Exception as error:
            log.exception("asking %s failed", self._node)
            transfer.fail(TransferError(repr(error), path=self.mover.path))
        if transfer.failed:
            request.settle()
        else:
            self._queue(request, self._threads, self._take)

    def _ask_for(self, request: Request, at: int, handle: RegionHandle) -> None:
        try:
            self.mover.ask(handle, writable=request.writes)
        except TransferError as error:
            error.slice_index = request.slice_index(at)
            raise

    def _take(self, request: Request) -> None:
        with self._lock:
            self._waiting.pop(request, None)
        self._copy(request, alone=False)

    def _copy(self, request: Request, *, alone: bool) -> None:
        transfer = request.transfer
        try:
            if self._end is not None:
                transfer.fail(self._end)
            if not transfer.hopeless():
                if not self._reaches_all(request):
                    self._elsewhere(request)
                    return
                digests = self.mover.move(request, alone=alone)
                if len(digests) == len(request.views):
                    request.moved(digests)
        except TransferError as error:
            error.path = self.mover.path
            transfer.fail(error)
        except BaseException as error:
            log.exception("copying failed")
            transfer.fail(TransferError(repr(error), path=self.mover.path))
            request.settle()
            raise
        request.settle()

    def _reaches_all(self, request: Request) -> bool:
        for at, handle in enumerate(_distinct(request.handles)):
            try:
                if not self.mover.reaches(handle, writable=request.writes):
                    return False
            except TransferError as error:
                error.slice_index = request.slice_index(at)
                raise
        return True


def _alike(handles: Sequence[RegionHandle]) -> bool:
    return handles.count(handles[0]) == len(handles)


def _distinct(handles: Sequence[RegionHandle]) -> Sequence[RegionHandle]:
    """One where all are the same, as is usual; else all."""
    return handles[:1] if _alike(handles) else handles


def _is_there(request: Request, memory: Attached) -> bool:
    """Whether many pieces, close to one another, all have memory: asked for at once."""
    offsets, views = request.offsets, request.views
    if len(views) == 1 or len(_distinct(request.handles)) > 1:
        return False
    first, last = min(offsets), max(map(add, offsets, map(len, views)))
    if last > len(memory.view) or last - first > _MOST_SPREAD * request.nbytes:
        return False
    return memory.present(first, last - first)
