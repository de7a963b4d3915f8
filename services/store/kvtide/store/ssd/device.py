"""The tier's files, worked on in threads of their own: the event loop never waits.

Reads, writes and everything else have threads each, so that no write waits behind a
read or a read behind a write. Each command is answered by one event, in the loop.
"""

import asyncio
import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import structlog
from prometheus_client import Histogram
from xxhash import xxh3_64_intdigest

from kvtide.kv import renewed_header
from kvtide.runtime import Clock
from kvtide.store.checks import Verify
from kvtide.store.ssd.buffers import Buffers, copy
from kvtide.store.ssd.directory import (
    Deletions,
    Directory,
    read_all,
    write_all,
)
from kvtide.store.ssd.errors import FormatError, WrongDirectory
from kvtide.store.ssd.events import (
    CloseTier,
    DeletedSpace,
    DropSegment,
    KillRecord,
    MoveRecord,
    NoteDeleted,
    OpenTier,
    ReadRecord,
    RecordDone,
    SealSegment,
    SegmentDone,
    SsdCommand,
    SsdEvent,
    TierFailed,
    TierOpened,
    Trouble,
    WriteRecord,
)
from kvtide.store.ssd.format import FRAME_BYTES, PAGE_BYTES, Frame, check_frame
from kvtide.store.ssd.scan import Scan
from kvtide.store.ssd.segments import Place
from kvtide.store.verify import what_differs

log = structlog.get_logger("kvtide.store")

FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
QUIET_S = 30.0


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """``deleted`` says what was deleted while this node was down; it may block."""

    path: Path
    node: str
    key_id: int
    read_threads: int = 4
    write_threads: int = 1
    deleted: Callable[[], Sequence[DeletedSpace]] = tuple


class _Bad(Exception):  # noqa: N818 - inside this module: becomes a Trouble
    """The bytes are not what they should be."""


class _NotRead(Exception):  # noqa: N818 - as above
    """A record could not be read."""


class SsdDevice:
    """One life's way to the files. ``submit`` never blocks and never fails."""

    def __init__(
        self,
        spec: DeviceSpec,
        arena: memoryview,
        clock: Clock,
        tell: Callable[[SsdEvent], None],
        seconds: Histogram | None = None,
    ) -> None:
        """``tell`` is called in this loop. Nothing is opened yet.

        ``seconds`` observes how long each operation took.
        """
        self._seconds = seconds
        self._spec = spec
        self._arena = arena
        self._clock = clock
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._directory: Directory | None = None
        self._buffers = Buffers()
        self._control = ThreadPoolExecutor(1, thread_name_prefix="store-ssd")
        self._writers = ThreadPoolExecutor(
            spec.write_threads, thread_name_prefix="store-ssd-write"
        )
        self._readers = ThreadPoolExecutor(
            spec.read_threads, thread_name_prefix="store-ssd-read"
        )
        self._state = threading.Condition()
        self._busy = 0
        self._copying = 0
        self._ended = False

    # ---- life

    def end_copies(self) -> None:
        """Write nothing into the arena from now on; waits for copies under way."""
        with self._state:
            self._ended = True
            self._state.wait_for(lambda: self._copying == 0)

    async def close(self, timeout_s: float) -> None:
        """Drop what waits, wait for what runs, and let go of the directory."""
        self.end_copies()
        await asyncio.to_thread(self._close, timeout_s)

    def _close(self, timeout_s: float) -> None:
        for pool in (self._readers, self._writers, self._control):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._state:
            quiet = self._state.wait_for(lambda: self._busy == 0, timeout_s)
        if not quiet:
            log.warning("ssd_hangs", path=str(self._spec.path))
        self._let_go()

    # ---- work

    def submit(self, command: SsdCommand) -> None:
        """Have it done, and answered by its event."""
        match command:
            case ReadRecord():
                self._do(self._readers, "read", lambda: self._read(command))
            case WriteRecord():
                self._do(self._writers, "write", lambda: self._write(command))
            case MoveRecord():
                self._do(self._writers, "move", lambda: self._move(command))
            case OpenTier():
                self._do(self._control, "open", self._open)
            case CloseTier():
                self._do(self._control, "close", self._let_go_quietly)
            case SealSegment(segment, tail):
                self._do(self._control, "seal", lambda: self._seal(segment, tail))
            case DropSegment(segment):
                self._do(self._control, "drop", lambda: self._drop(segment))
            case KillRecord():
                self._do(self._control, "kill", lambda: self._kill(command))
            case NoteDeleted(deleted):
                self._do(self._control, "note", lambda: self._note(deleted))
            case _:
                assert_never(command)

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

    # ---- the directory

    def _open(self) -> SsdEvent:
        """Lock it and tell what is there."""
        started_s = self._clock.monotonic()
        try:
            self._let_go_quietly()
            spec = self._spec
            directory = Directory(spec.path, spec.node, spec.key_id)
            self._directory = directory
            if not directory.direct:
                log.warning(
                    "ssd_buffered",
                    path=str(spec.path),
                    reason="this file system has no direct I/O: reads go through the "
                    "page cache",
                )
            deletions = Deletions([*directory.deleted(), *spec.deleted()])
            scan = Scan(directory, self._buffers, deletions)
            scan.run(self._say, lambda: self._ended)
        except (OSError, WrongDirectory) as error:
            self._let_go()
            return TierFailed(f"{self._spec.path}: {_text(error)}")
        took_s = self._clock.monotonic() - started_s
        return TierOpened(scan.torn, took_s, directory.direct)

    def _let_go_quietly(self) -> None:
        """Close the directory once nothing works on it any more."""
        with self._state:
            quiet = self._state.wait_for(lambda: self._busy == 0, QUIET_S)
        if not quiet:
            log.warning("ssd_hangs", path=str(self._spec.path))
        self._let_go()

    def _let_go(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def _held(self) -> Directory:
        directory = self._directory
        if directory is None:
            raise OSError(errno.EBADF, "the directory is closed")
        return directory

    def _trouble(self, error: Exception, *, writing: bool) -> tuple[Trouble, str]:
        """What it means for the tier that an operation failed."""
        reason = _text(error)
        if isinstance(error, (_Bad, FormatError)):
            return Trouble.CORRUPT, reason
        try:
            self._held().probe()
        except OSError as probe_error:
            return Trouble.GONE, f"{reason}; {_text(probe_error)}"
        if not writing or isinstance(error, _NotRead):
            return Trouble.UNREADABLE, reason
        full = isinstance(error, OSError) and error.errno in FULL_ERRORS
        return (Trouble.FULL if full else Trouble.UNWRITABLE), reason

    # ---- records

    def _write(self, command: WriteRecord) -> SsdEvent:
        wanted, place = command.wanted, command.place
        try:
            buffer = self._buffers.get(place.length)
            image = buffer[FRAME_BYTES : FRAME_BYTES + wanted.slot_bytes]
            copy(image, self._arena[wanted.offset : wanted.offset + wanted.slot_bytes])
            _check(buffer, wanted)
            written_ms = int(self._clock.wall() * 1000)
            self._write_at(place, command.lsn, wanted, written_ms, buffer)
        except (OSError, _Bad, FormatError) as error:
            return RecordDone(command.number, *self._trouble(error, writing=True))
        return RecordDone(command.number)

    def _move(self, command: MoveRecord) -> SsdEvent:
        try:
            buffer = self._buffers.get(command.place.length)
            frame = self._read_at(
                command.source, command.source_lsn, command.wanted, buffer
            )
            self._write_at(
                command.place, command.lsn, command.wanted, frame.written_ms, buffer
            )
        except (OSError, _Bad, _NotRead, FormatError) as error:
            return RecordDone(command.number, *self._trouble(error, writing=True))
        return RecordDone(command.number)

    def _read(self, command: ReadRecord) -> SsdEvent:
        wanted = command.wanted
        try:
            buffer = self._buffers.get(command.place.length)
            self._read_at(command.place, command.lsn, wanted, buffer)
            start = FRAME_BYTES + wanted.header_bytes
            header = renewed_header(
                bytes(buffer[FRAME_BYTES:start]), command.generation
            )
            image = buffer[FRAME_BYTES : FRAME_BYTES + wanted.slot_bytes]
            image[: len(header)] = header
            self._copy_in(wanted.offset, image)
        except (OSError, _Bad, _NotRead, FormatError) as error:
            return RecordDone(command.number, *self._trouble(error, writing=False))
        return RecordDone(command.number, header_xxh3=xxh3_64_intdigest(header))

    def _copy_in(self, offset: int, image: memoryview) -> None:
        with self._state:
            if self._ended:
                # the arena may be another life's by now
                raise OSError(errno.ECANCELED, "this life of the store is over")
            self._copying += 1
        try:
            copy(self._arena[offset : offset + len(image)], image)
        finally:
            with self._state:
                self._copying -= 1
                self._state.notify_all()

    def _write_at(
        self,
        place: Place,
        lsn: int,
        wanted: Verify,
        written_ms: int,
        buffer: memoryview,
    ) -> None:
        """Write the image that lies in ``buffer`` as a record."""
        directory = self._held()
        end = FRAME_BYTES + wanted.slot_bytes
        frame = Frame(
            segment=place.segment,
            offset=place.offset,
            lsn=lsn,
            slot_bytes=wanted.slot_bytes,
            header_bytes=wanted.header_bytes,
            written_ms=written_ms,
        )
        header = buffer[FRAME_BYTES : FRAME_BYTES + wanted.header_bytes]
        buffer[:FRAME_BYTES] = frame.encode(header, directory.seed)
        buffer[end:] = bytes(len(buffer) - end)
        with directory.segment(place.segment, write=True) as fd:
            write_all(fd, buffer, place.offset)
            if place.offset == PAGE_BYTES:
                directory.begin_segment(fd, place.segment, buffer)

    def _read_at(
        self, place: Place, lsn: int, wanted: Verify, buffer: memoryview
    ) -> Frame:
        """Read and verify a record."""
        directory = self._held()
        try:
            with directory.segment(place.segment) as fd:
                read_all(fd, buffer[: place.length], place.offset)
        except OSError as error:
            raise _NotRead(_text(error)) from error
        frame = check_frame(
            buffer, segment=place.segment, offset=place.offset, seed=directory.seed
        )
        if frame.lsn != lsn or frame.dead:
            raise _Bad("another record lies there")
        _check(buffer, wanted)
        return frame

    def _kill(self, command: KillRecord) -> None:
        """Mark a record as dead where it lies."""
        place = command.place
        with suppress(OSError, FormatError):
            directory = self._held()
            with directory.segment(place.segment, write=True) as fd:
                buffer = self._buffers.get(place.length)
                read_all(fd, buffer, place.offset)
                frame = check_frame(
                    buffer,
                    segment=place.segment,
                    offset=place.offset,
                    seed=directory.seed,
                )
                dead = Frame(
                    frame.segment,
                    frame.offset,
                    frame.lsn,
                    frame.slot_bytes,
                    frame.header_bytes,
                    frame.written_ms,
                    dead=True,
                )
                header = buffer[FRAME_BYTES : FRAME_BYTES + frame.header_bytes]
                buffer[:FRAME_BYTES] = dead.encode(header, directory.seed)
                write_all(fd, buffer[:PAGE_BYTES], place.offset)

    # ---- segments

    def _seal(self, segment: int, tail: int) -> SsdEvent:
        try:
            self._held().seal(segment, tail, self._buffers.get(PAGE_BYTES))
        except OSError as error:
            trouble, reason = self._trouble(error, writing=True)
            return SegmentDone(segment, dropped=False, trouble=trouble, reason=reason)
        return SegmentDone(segment, dropped=False)

    def _drop(self, segment: int) -> SsdEvent:
        try:
            self._held().drop(segment)
        except OSError as error:
            trouble, reason = self._trouble(error, writing=True)
            return SegmentDone(segment, dropped=True, trouble=trouble, reason=reason)
        return SegmentDone(segment, dropped=True)

    def _note(self, deleted: DeletedSpace) -> None:
        try:
            self._held().note_deleted(deleted)
        except OSError as error:
            log.warning("ssd_deletion_not_kept", reason=_text(error))


def _failed(done: Future[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("ssd_operation_failed", exc_info=done.exception())


def _check(buffer: memoryview, wanted: Verify) -> None:
    """Compare the image in a record's buffer with what it must be."""
    image = Verify(
        slot=wanted.slot,
        generation=wanted.generation,
        offset=FRAME_BYTES,
        slot_bytes=wanted.slot_bytes,
        header_bytes=wanted.header_bytes,
        key=wanted.key,
        tags=wanted.tags,
        tokens=wanted.tokens,
        header_xxh3=wanted.header_xxh3,
    )
    reason = what_differs(buffer, image)
    if reason:
        raise _Bad(reason)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or repr(error)
