"""What is done to the tier's files, one command after the other; everything may block.

Safe to use from several threads, but for ``open`` and ``close``.
"""

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

import structlog
from xxhash import xxh3_64_intdigest

from kvtide.kv import renewed_header
from kvtide.runtime import Clock
from kvtide.store.ssd.buffers import Buffers, copy
from kvtide.store.ssd.deletions import Deletions
from kvtide.store.ssd.directory import Directory, read_all, write_all
from kvtide.store.ssd.errors import (
    FormatError,
    KeysAwayError,
    LockedError,
    WrongDirectory,
)
from kvtide.store.ssd.events import (
    DeletedSpace,
    DropSegment,
    FileCommand,
    Found,
    KillRecord,
    MoveRecord,
    NoteDeleted,
    NoteRemoved,
    ReadRecord,
    RecordDone,
    SealSegment,
    SegmentDone,
    SsdEvent,
    TierFailed,
    TierOpened,
    Tombstone,
    Trouble,
    WriteRecord,
)
from kvtide.store.ssd.format import FRAME_BYTES, PAGE_BYTES, check_frame
from kvtide.store.ssd.records import BadRecordError, NotReadError, Records, check
from kvtide.store.ssd.scan import Scan
from kvtide.store.ssd.sealing import Seals, TenantKeys

log = structlog.get_logger("kvtide.store")

FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class FilesSpec:
    """``deleted`` says what was deleted while this node was down; it may block.

    ``keys``: records are sealed with tenants' keys. ``plain``: those from before are read.
    """

    path: Path
    node: str
    key_id: int
    deleted: Callable[[], Sequence[Tombstone]] = tuple
    keys: TenantKeys | None = None
    plain: bool = True


_FAULTS = (OSError, BadRecordError, NotReadError, LockedError, FormatError)


class TierFiles:
    """See the module. Between ``open`` and ``close`` the directory is locked."""

    def __init__(self, spec: FilesSpec, arena: memoryview, clock: Clock) -> None:
        """Nothing is opened yet."""
        self._spec = spec
        self._arena = arena
        self._clock = clock
        self._records: Records | None = None
        self._buffers = Buffers()
        self._state = threading.Condition()
        self._copying = 0
        self._ended = False

    def end_copies(self) -> None:
        """Write nothing into the arena from now on; waits for copies under way."""
        with self._state:
            self._ended = True
            self._state.wait_for(lambda: self._copying == 0)

    def do(self, command: FileCommand) -> SsdEvent | None:
        """Do it; the event that answers it, if one does."""
        match command:
            case ReadRecord():
                return self._read(command)
            case WriteRecord():
                return self._write(command)
            case MoveRecord():
                return self._move(command)
            case SealSegment() | DropSegment():
                return self._end_segment(command)
            case KillRecord():
                self._kill(command)
            case NoteDeleted(deleted):
                self._note(lambda held: held.note_deleted(deleted))
            case NoteRemoved(keys, until_ms):
                self._note(lambda held: held.note_removed(keys, until_ms))
            case _:
                assert_never(command)
        return None

    # ---- the directory

    def open(self, say: Callable[[Found], None]) -> TierOpened | TierFailed:
        """Lock the directory and say what is there; one that was open is let go."""
        started_s = self._clock.monotonic()
        self.close()
        try:
            spec = self._spec
            directory = Directory(spec.path, spec.node, spec.key_id)
            self._records = records = Records(directory, None, plain=spec.plain)
            if spec.keys is not None:
                directory.note_wrapping(spec.keys.open())
                records.seals = Seals(spec.keys, directory.id)
            if not directory.direct:
                log.warning(
                    "ssd_buffered",
                    path=str(spec.path),
                    reason="this file system has no direct I/O: reads go through the "
                    "page cache",
                )
            deletions = Deletions([*directory.deleted(), *spec.deleted()])
            for key, until_ms in directory.removed().items():
                deletions.add_key(key, until_ms)
            scan = Scan(records, self._buffers, deletions)
            scan.run(say, lambda: self._ended)
            if scan.locked:
                log.info("ssd_locked", records=scan.locked, path=str(spec.path))
        except (OSError, WrongDirectory, KeysAwayError) as error:
            self.close()
            return TierFailed(f"{self._spec.path}: {_text(error)}")
        took_s = self._clock.monotonic() - started_s
        return TierOpened(scan.torn, took_s, directory.direct)

    def close(self) -> None:
        """Let go of the directory. Nothing may be under way. Idempotent."""
        records, self._records = self._records, None
        if records is not None:
            records.directory.close()

    def _open_records(self) -> Records:
        records = self._records
        if records is None:
            raise OSError(errno.EBADF, "the directory is closed")
        return records

    def _held(self) -> Directory:
        return self._open_records().directory

    def _trouble(self, error: Exception, *, writing: bool) -> tuple[Trouble, str]:
        """What it means for the tier that an operation failed."""
        reason = _text(error)
        if isinstance(error, (BadRecordError, FormatError)):
            return Trouble.CORRUPT, reason
        if isinstance(error, LockedError):
            return Trouble.LOCKED, reason
        try:
            self._held().probe()
        except OSError as probe_error:
            return Trouble.GONE, f"{reason}; {_text(probe_error)}"
        if not writing or isinstance(error, NotReadError):
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
            check(buffer, wanted)
            written_ms = int(self._clock.wall() * 1000)
            self._open_records().write(place, command.lsn, wanted, written_ms, buffer)
        except _FAULTS as error:
            return RecordDone(command.number, *self._trouble(error, writing=True))
        return RecordDone(command.number)

    def _move(self, command: MoveRecord) -> SsdEvent:
        wanted = command.wanted
        try:
            longest = max(command.place.length, command.source.length)
            buffer = self._buffers.get(longest)
            records = self._open_records()
            frame = records.read(command.source, command.source_lsn, wanted, buffer)
            records.write(command.place, command.lsn, wanted, frame.written_ms, buffer)
        except _FAULTS as error:
            return RecordDone(command.number, *self._trouble(error, writing=True))
        return RecordDone(command.number)

    def _read(self, command: ReadRecord) -> SsdEvent:
        wanted = command.wanted
        try:
            buffer = self._buffers.get(command.place.length)
            self._open_records().read(command.place, command.lsn, wanted, buffer)
            start = FRAME_BYTES + wanted.header_bytes
            header = renewed_header(
                bytes(buffer[FRAME_BYTES:start]), command.generation
            )
            image = buffer[FRAME_BYTES : FRAME_BYTES + wanted.slot_bytes]
            image[: len(header)] = header
            self._copy_in(wanted.offset, image)
        except _FAULTS as error:
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
                dead = replace(frame, dead=True)
                covered = buffer[FRAME_BYTES : FRAME_BYTES + frame.covered_bytes]
                buffer[:FRAME_BYTES] = dead.encode(covered, directory.seed)
                write_all(fd, buffer[:PAGE_BYTES], place.offset)

    # ---- segments

    def _end_segment(self, command: SealSegment | DropSegment) -> SsdEvent:
        number, dropped = command.segment, isinstance(command, DropSegment)
        try:
            if isinstance(command, DropSegment):
                self._held().drop(number)
            else:
                buffer = self._buffers.get(PAGE_BYTES)
                self._held().seal(number, command.tail, buffer)
        except OSError as error:
            trouble, reason = self._trouble(error, writing=True)
            return SegmentDone(number, dropped, trouble, reason)
        return SegmentDone(number, dropped)

    def forget_key(self, deleted: DeletedSpace) -> None:
        """Whoever deletes a tenant has destroyed its key: have none in memory, too.

        Called at once, before what was written later is: ``do`` keeps the note alone.
        """
        seals = None if self._records is None else self._records.seals
        if seals is not None and deleted.tenant is not None and deleted.model is None:
            seals.forget(deleted.tenant)

    def _note(self, note: Callable[[Directory], None]) -> None:
        try:
            note(self._held())
        except (OSError, WrongDirectory) as error:
            log.warning("ssd_deletion_not_kept", reason=_text(error))


def _text(error: Exception) -> str:
    if isinstance(error, NotReadError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or repr(error)
