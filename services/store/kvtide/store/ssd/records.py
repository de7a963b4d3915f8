"""Records in and out of segment files, sealed or as they are. Everything may block.

A record is worked on as a plain one: a frame's room, then the block's image. What lies
on the disk of a sealed one is another buffer's.
"""

from dataclasses import replace

from kvtide.store.checks import Verify
from kvtide.store.ssd.buffers import Buffers, copy
from kvtide.store.ssd.directory import Directory, read_all, write_all
from kvtide.store.ssd.errors import LockedError
from kvtide.store.ssd.format import (
    FRAME_BYTES,
    PAGE_BYTES,
    Frame,
    Head,
    check_frame,
    head_of,
)
from kvtide.store.ssd.sealing import Seals
from kvtide.store.ssd.segments import Place
from kvtide.store.verify import what_differs


class BadRecordError(Exception):
    """The bytes are not what they should be."""


class NotReadError(Exception):
    """A record could not be read; ``__cause__`` is the system's word."""


class Records:
    """The records of an open directory. Safe in threads.

    ``seals`` None: nothing is sealed, and what is can't be read. ``plain``: what was
    written without seals is read.
    """

    def __init__(
        self, directory: Directory, seals: Seals | None, *, plain: bool = True
    ) -> None:
        """Nothing is read yet."""
        self.directory = directory
        self.seals = seals
        self._plain = plain
        self._disk = Buffers()

    def write(
        self, place: Place, lsn: int, wanted: Verify, written_ms: int, plain: memoryview
    ) -> None:
        """Write the image that lies in ``plain`` behind the room for a frame.

        Raises:
            OSError: it can't be written.
            LockedError: the tenant's key is destroyed, or can't be had now.
        """
        directory, seals = self.directory, self.seals
        frame = Frame(
            segment=place.segment,
            offset=place.offset,
            lsn=lsn,
            slot_bytes=wanted.slot_bytes,
            header_bytes=wanted.header_bytes,
            written_ms=written_ms,
            sealed=seals is not None,
        )
        image = plain[FRAME_BYTES : FRAME_BYTES + wanted.slot_bytes]
        if seals is None:
            record, end = plain[: place.length], FRAME_BYTES + wanted.slot_bytes
        else:
            record = self._disk.get(place.length)
            end = seals.seal(frame, wanted.tags.tenant, image).into(record)
        covered = record[FRAME_BYTES : FRAME_BYTES + frame.covered_bytes]
        record[:FRAME_BYTES] = frame.encode(covered, directory.seed)
        record[end:] = bytes(len(record) - end)
        with directory.segment(place.segment, write=True) as fd:
            write_all(fd, record, place.offset)
            if place.offset == PAGE_BYTES:
                directory.begin_segment(fd, place.segment, record)

    def read(self, place: Place, lsn: int, wanted: Verify, plain: memoryview) -> Frame:
        """Read a record and verify it; its image lies in ``plain`` then, as above.

        Raises:
            NotReadError: the file can't be read.
            BadRecordError, FormatError: it is not what it should be.
            LockedError: the tenant's key is destroyed.
        """
        sealing = self.seals is not None
        record = self._disk.get(place.length) if sealing else plain[: place.length]
        try:
            with self.directory.segment(place.segment) as fd:
                read_all(fd, record, place.offset)
        except OSError as error:
            raise NotReadError from error
        frame = check_frame(
            record,
            segment=place.segment,
            offset=place.offset,
            seed=self.directory.seed,
        )
        other = frame.lsn != lsn or frame.dead or frame.slot_bytes != wanted.slot_bytes
        # who can write to the disk may have put another kind of record there
        refused = not frame.sealed and not self._plain
        if other or refused or frame.length != place.length:
            raise BadRecordError("another record lies there")
        if sealing or frame.sealed:
            self.open(frame, record, plain)
        check(plain, wanted)
        return frame

    def open(self, frame: Frame, record: memoryview, plain: memoryview) -> None:
        """Have the image of a record that was read lie in ``plain``, not yet verified.

        Raises:
            FormatError: these are not the bytes that were sealed.
            LockedError: the tenant's key is destroyed.
        """
        end = FRAME_BYTES + frame.slot_bytes
        if frame.sealed:
            self._must_seal().open(frame, record, plain[FRAME_BYTES:end])
        else:
            copy(plain[FRAME_BYTES:end], record[FRAME_BYTES:end])

    def head(
        self, data: memoryview, *, segment: int, offset: int
    ) -> tuple[Frame, Head | None]:
        """The record that starts at ``data``; no head: nobody may read it any more.

        Raises:
            FormatError: there is none, it is torn, or it belongs elsewhere.
        """
        frame = check_frame(
            data, segment=segment, offset=offset, seed=self.directory.seed
        )
        if not frame.sealed:
            raw = bytes(data[FRAME_BYTES : FRAME_BYTES + frame.header_bytes])
            return frame, head_of(frame, raw) if self._plain else None
        try:
            return frame, head_of(frame, self._must_seal().open_header(frame, data))
        except LockedError:
            return frame, None

    def _must_seal(self) -> Seals:
        if self.seals is None:
            raise LockedError("the record is sealed, and there are no keys")
        return self.seals


def check(plain: memoryview, wanted: Verify) -> None:
    """Compare the image in a record's buffer with what it must be.

    Raises:
        BadRecordError: it is another.
    """
    reason = what_differs(plain, replace(wanted, offset=FRAME_BYTES))
    if reason:
        raise BadRecordError(reason)
