"""The tier's files, worked on in threads of their own: the event loop never waits.

Reads, writes and everything else have threads each, so that no write waits behind a
read or a read behind a write. Each command is answered by one event, in the loop.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import assert_never

import structlog
from prometheus_client import Histogram

from kvtide.runtime import Clock
from kvtide.store.ssd.events import (
    CloseTier,
    DropSegment,
    KillRecord,
    MoveRecord,
    NoteDeleted,
    NoteRemoved,
    OpenTier,
    ReadRecord,
    SealSegment,
    SsdCommand,
    SsdEvent,
    WriteRecord,
)
from kvtide.store.ssd.files import FilesSpec, TierFiles

log = structlog.get_logger("kvtide.store")

QUIET_S = 30.0


class SsdDevice:
    """One life's way to the files. ``submit`` never blocks and never fails."""

    def __init__(
        self,
        files: TierFiles,
        clock: Clock,
        tell: Callable[[SsdEvent], None],
        *,
        read_threads: int = 4,
        write_threads: int = 1,
        seconds: Histogram | None = None,
    ) -> None:
        """``tell`` is called in this loop. Nothing is opened yet.

        ``seconds`` observes how long each operation took.
        """
        self._files = files
        self._clock = clock
        self._tell = tell
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._control = ThreadPoolExecutor(1, thread_name_prefix="store-ssd")
        self._writers = ThreadPoolExecutor(
            write_threads, thread_name_prefix="store-ssd-write"
        )
        self._readers = ThreadPoolExecutor(
            read_threads, thread_name_prefix="store-ssd-read"
        )
        self._state = threading.Condition()
        self._busy = 0

    # ---- life

    def end_copies(self) -> None:
        """Write nothing into the arena from now on; waits for copies under way."""
        self._files.end_copies()

    async def close(self, timeout_s: float) -> None:
        """Drop what waits, wait for what runs, and let go of the directory."""
        self.end_copies()
        await asyncio.to_thread(self._close, timeout_s)

    def _close(self, timeout_s: float) -> None:
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._quiet(timeout_s)
        self._control.shutdown(wait=True, cancel_futures=True)
        self._files.close()

    def _quiet(self, timeout_s: float) -> None:
        """Wait until nothing works on the directory."""
        with self._state:
            quiet = self._state.wait_for(lambda: self._busy == 0, timeout_s)
        if not quiet:
            log.warning("ssd_hangs")

    # ---- work

    def submit(self, command: SsdCommand) -> None:
        """Have it done, and answered by its event."""
        match command:
            case ReadRecord():
                self._do(self._readers, "read", partial(self._files.do, command))
            case WriteRecord():
                self._do(self._writers, "write", partial(self._files.do, command))
            case MoveRecord():
                self._do(self._writers, "move", partial(self._files.do, command))
            case OpenTier():
                self._do(self._control, "open", self._open)
            case CloseTier():
                self._do(self._control, "close", self._let_go)
            case SealSegment():
                self._do(self._control, "seal", partial(self._files.do, command))
            case NoteDeleted():
                # before a later write takes the tenant's key
                self._files.forget_key(command.deleted)
                self._do(self._control, "note", partial(self._files.do, command))
            case DropSegment() | KillRecord() | NoteRemoved():
                self._do(self._control, "note", partial(self._files.do, command))
            case _:
                assert_never(command)

    def _open(self) -> SsdEvent:
        self._quiet(QUIET_S)
        return self._files.open(self._say)

    def _let_go(self) -> None:
        self._quiet(QUIET_S)
        self._files.close()

    def _do(
        self,
        pool: ThreadPoolExecutor,
        name: str,
        work: Callable[[], SsdEvent | None],
    ) -> None:
        def run() -> None:
            # what waits until nothing works must not wait for itself
            counts = pool is not self._control
            started_s = self._clock.monotonic()
            with self._state:
                self._busy += counts
            try:
                event = work()
            finally:
                with self._state:
                    self._busy -= counts
                    self._state.notify_all()
            if self._seconds is not None:
                took_s = self._clock.monotonic() - started_s
                self._seconds.labels(name).observe(took_s)
            if event is not None:
                self._say(event)

        # after the close nobody waits for an answer
        with suppress(RuntimeError):
            pool.submit(run).add_done_callback(_failed)

    def _say(self, event: SsdEvent) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell, event)


def _failed(done: Future[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("ssd_operation_failed", exc_info=done.exception())


__all__ = ["FilesSpec", "SsdDevice", "TierFiles"]
