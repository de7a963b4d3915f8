"""One batch of reads or writes under way: awaitable, pollable, cancellable."""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Sequence

from kvtide.runtime import Clock
from kvtide.transfer.buffers import SliceDigest
from kvtide.transfer.errors import Cancelled, TimedOut, TransferError
from kvtide.transfer.handles import Operation, Priority, TransferResult
from kvtide.transfer.plan import Piece

log = logging.getLogger("kvtide.transfer")

Abort = Callable[["Transfer"], None]
"""Stops the parts of a transfer that wait or run; each still settles."""


class Transfer:
    """A batch under way. Safe to use from any thread.

    It ends when every part of it has settled: only then is the caller's memory
    the caller's again.
    """

    # most transfers need none of these: what is not set costs nothing
    _is_over = False
    _over: "threading.Lock | None" = None
    """Made for the first that waits, and held until the end."""
    _unsettled = 0
    _failure: TransferError | None = None
    _path = ""
    _split: dict[int, SliceDigest] | None = None
    _callbacks: list[Callable[[], None]] | None = None
    _abort: Abort | None = None
    _help: Abort | None = None
    finish: Callable[[], None] | None = None
    """What a thread that waits does first, before it looks further."""
    _finale: Abort | None = None
    _ended: Abort | None = None

    def __init__(
        self,
        *,
        slice_count: int,
        operation: Operation,
        purpose: str,
        priority: Priority,
        timeout_s: float,
        clock: Clock,
        trace: str = "",
        retries: int = 3,
        nbytes: int = 0,
    ) -> None:
        """Made by ``TransferPeer.read`` and ``write``."""
        self.operation = operation
        self.purpose = purpose
        self.trace = trace
        self.priority = priority
        self.nbytes = nbytes
        self.started_s = clock.monotonic()
        self.deadline_s = self.started_s + timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._xxh3 = [0] * slice_count
        self._retries_left = retries

    # ---- the caller's side

    def done(self) -> bool:
        """Whether the transfer has ended and the memory is the caller's again."""
        return self._is_over

    def cancel(self) -> None:
        """Ask for an early end; the transfer ends when its running parts have."""
        self.fail(Cancelled("the transfer was cancelled"))

    def result(self) -> TransferResult:
        """The result of a transfer that has ended.

        Raises:
            TransferError: why it failed.
            RuntimeError: it has not ended.
        """
        if not self._is_over:
            message = "the transfer has not ended"
            raise RuntimeError(message)
        if self._failure is not None:
            raise self._failure
        return TransferResult(tuple(self._xxh3), self.nbytes, self._path or "tcp")

    def wait_blocking(self, timeout_s: float | None = None) -> TransferResult:
        """Wait in a thread for the end.

        With ``timeout_s``, gives up waiting after that time; the transfer goes on.

        Raises:
            TimedOut: its deadline passed; or ``timeout_s`` did, with ``done()``
                still false.
            TransferError: why it failed.
        """
        if timeout_s is not None and timeout_s < self.remaining_s():
            if not self._wait_over(timeout_s):
                raise TimedOut(f"the transfer did not end within {timeout_s} s")
            return self.result()
        finish, self.finish = self.finish, None
        if finish is not None and not self._is_over:
            finish()
        if not self._is_over and self._help is not None:
            self._help(self)
        if self._is_over:
            return self.result()
        if not self._wait_over(max(0.0, self.remaining_s())):
            self.expire()
            self._wait_over(-1)
        return self.result()

    def _wait_over(self, timeout_s: float) -> bool:
        with self._lock:
            if self._is_over:
                return True
            over = self._over
            if over is None:
                over = self._over = threading.Lock()
                over.acquire()
        if not over.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            return False
        over.release()
        return True

    def __await__(self) -> Generator[None, None, TransferResult]:
        """Wait for the end; if the waiting task is cancelled, cancel first.

        A cancelled task gets its ``CancelledError`` only once the memory is free.
        """
        return self._wait().__await__()

    async def _wait(self) -> TransferResult:
        if self._is_over:
            return self.result()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def ended() -> None:
            # the loop may be closed if nobody waits any more
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.when_ended(ended)
        timer = loop.call_later(max(0.0, self.remaining_s()), self.expire)
        try:
            await self._shielded(future)
        finally:
            timer.cancel()
        return self.result()

    async def _shielded(self, future: asyncio.Future[None]) -> None:
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                cancelled = error
                self.cancel()
        if cancelled is not None:
            raise cancelled

    # ---- the transport's side

    @property
    def path(self) -> str:
        """The transport that carried it; "tcp" when several did."""
        return self._path or "tcp"

    @property
    def failed(self) -> bool:
        """Whether it will end in an error: its parts need not be done any more."""
        return self._failure is not None

    @property
    def failure(self) -> TransferError | None:
        """Why it failed, if it did."""
        return self._failure

    def remaining_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline_s - self._clock.monotonic()

    def begin(
        self,
        parts: int,
        abort: Abort,
        assist: Abort | None = None,
        finale: Abort | None = None,
        ended: Abort | None = None,
    ) -> None:
        """Say how many parts must settle; once, at the start.

        ``abort`` stops them; ``assist`` lets a thread that waits work for them;
        ``finale`` is called when all is moved, and must lead to ``conclude``; ``ended``
        is the first to hear of the end.
        """
        self._finale = finale
        self._ended = ended
        self._unsettled = parts
        self._abort = abort
        self._help = assist
        if parts == 0:
            self._wind_up()

    def done_at_once(self, xxh3: int, path: str) -> None:
        """All of its one slice has been moved before anybody knew of the transfer."""
        self._xxh3[0] = xxh3
        self._path = path
        self._is_over = True

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once, from any thread, at the end."""
        with self._lock:
            if not self._is_over:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def split(self, slice_index: int, view: memoryview) -> None:
        """Say, before the start, that a slice is moved in several pieces."""
        if self._split is None:
            self._split = {}
        self._split[slice_index] = SliceDigest(view)

    def moved(self, piece: Piece, xxh3: int) -> None:
        """A piece has been moved; its checksum. Before its part is settled."""
        split = self._split
        whole = None if split is None else split.get(piece.slice_index)
        if whole is None:
            self._xxh3[piece.slice_index] = xxh3
        else:
            whole.ready(piece.start, piece.length)

    def moved_all(self, xxh3: Sequence[int]) -> None:
        """All slices have been moved, each in one piece; their checksums."""
        self._xxh3[:] = xxh3

    def settle(self, path: str) -> None:
        """One part is over, well or not; its memory is not touched any more."""
        with self._lock:
            self._path = path if self._path in ("", path) else "tcp"
            self._unsettled -= 1
            if self._unsettled:
                return
            plain = self._finale is None and self._split is None
            if plain and self._callbacks is None:
                # the usual end, in one go
                self._is_over = True
                if self._over is not None:
                    self._over.release()
        if not self._is_over:
            self._wind_up()
        elif self._ended is not None:
            self._ended(self)

    def _wind_up(self) -> None:
        """All parts have settled: say so to the owner, if wanted, and end."""
        finale, self._finale = self._finale, None
        if finale is None or self._failure is not None:
            self._end()
            return
        finale(self)

    def fail(self, error: TransferError) -> None:
        """The transfer will end in ``error``, unless another came first."""
        with self._lock:
            if self._failure is not None or self._is_over:
                return
            self._failure = error
            abort = self._abort
        if abort is not None:
            abort(self)

    def conclude(self, error: TransferError | None) -> None:
        """The finale is over."""
        if error is not None:
            self.fail(error)
        self._end()

    def expire(self) -> None:
        """The deadline has passed."""
        seconds = self.deadline_s - self.started_s
        self.fail(TimedOut(f"the transfer did not end within {seconds:g} s"))

    def hopeless(self) -> bool:
        """Whether it will fail; it does now if its deadline has passed."""
        if self._failure is None and self.remaining_s() <= 0:
            self.expire()
        return self._failure is not None

    def spend_retry(self) -> bool:
        """Take one from the budget of retries; False when none is left."""
        with self._lock:
            if self._retries_left == 0:
                return False
            self._retries_left -= 1
            return True

    def _end(self) -> None:
        if self._split is not None:
            for slice_index, whole in self._split.items():
                self._xxh3[slice_index] = whole.value()
            self._split = None
        with self._lock:
            self._is_over = True
            if self._over is not None:
                self._over.release()
            callbacks, self._callbacks = self._callbacks, None
        if self._ended is not None:
            self._ended(self)
        if callbacks is not None:
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    # the others wait for theirs
                    log.exception("a callback at a transfer's end failed")
