"""What is in the segments of an earlier life: heads only, but the last ones in full.

A sealed segment was durable before it was sealed: its heads say all, and its parts are
verified when they are read. One that was being written is verified in full, cut after
its last good record and sealed; so a torn write is never announced.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtide.store.checks import Verify
from kvtide.store.ssd.buffers import Buffers
from kvtide.store.ssd.deletions import Deletions
from kvtide.store.ssd.directory import read_all
from kvtide.store.ssd.errors import FormatError, LockedError
from kvtide.store.ssd.events import Found, FoundRecord
from kvtide.store.ssd.format import (
    FRAME_BYTES,
    PAGE_BYTES,
    Head,
    head_bytes,
    whole_pages,
)
from kvtide.store.ssd.records import BadRecordError, Records, check
from kvtide.store.ssd.segments import Place

FOUND_AT_ONCE = 1000
WINDOW_BYTES = 1 << 20
SHORT_WINDOW_BYTES = 16 << 10
LONG_RECORD_BYTES = 256 << 10


@dataclass(slots=True)
class _Window:
    """A piece of a segment that was read."""

    data: memoryview
    start: int = 0
    length: int = 0


class Scan:
    """Reads what is there; in a thread. ``torn`` counts records that were dropped.

    ``locked`` counts those that nobody may read any more: they are garbage.
    """

    def __init__(
        self, records: Records, buffers: Buffers, deletions: Deletions
    ) -> None:
        """Nothing is read yet."""
        self._records = records
        self._directory = records.directory
        self._buffers = buffers
        self._plain = Buffers()
        self._deletions = deletions
        self.torn = 0
        self.locked = 0

    def run(self, tell: Callable[[Found], None], stop: Callable[[], bool]) -> None:
        """Tell of every segment and record; a segment that can't be read is left out.

        Raises:
            OSError: the directory itself can't be read.
        """
        for number in self._directory.numbers():
            if stop():
                return
            try:
                found = self._segment(number)
            except OSError:
                self._directory.probe()
                self.torn += 1
                continue
            for batch in found:
                tell(batch)

    def _segment(self, number: int) -> list[Found]:
        buffer = self._buffers.get(WINDOW_BYTES)
        with self._directory.segment(number) as fd:
            size = os.fstat(fd).st_size
            tail = self._directory.sealed_tail(fd, number, buffer)
            whole = PAGE_BYTES < tail <= size
            heads = list(self._heads(fd, number, tail if whole else size))
            if not whole:
                heads = [head for head in heads if self._is_good(fd, head)]
                tail = max((_end(head) for head in heads), default=PAGE_BYTES)
        if not whole:
            self._finish(number, tail, heads)
        alive = [head for head in heads if self._is_alive(head)]
        records = [_found(head) for head in alive]
        return [
            Found(number, 0 if i else tail, tuple(records[i : i + FOUND_AT_ONCE]))
            for i in range(0, max(1, len(records)), FOUND_AT_ONCE)
        ]

    def _finish(self, number: int, tail: int, heads: list[Head]) -> None:
        """Have an unsealed segment be as if it had been sealed."""
        with contextlib.suppress(OSError):
            # a file system that can't be written now is found out by the first write
            if heads:
                buffer = self._buffers.get(PAGE_BYTES)
                self._directory.seal(number, tail, buffer)

    def _is_alive(self, head: Head) -> bool:
        return not head.frame.dead and not self._deletions.cover(
            head.header.key, head.header.tags, head.frame.written_ms
        )

    def _is_good(self, fd: int, head: Head) -> bool:
        """Whether all of a record is there and right."""
        if head.frame.dead:
            return True
        buffer = self._buffers.get(max(head.frame.length, WINDOW_BYTES))
        record = buffer[: head.frame.length]
        try:
            read_all(fd, record, head.frame.offset)
        except OSError:
            self.torn += 1
            return False
        plain = self._plain.get(head.frame.length)
        try:
            self._records.open(head.frame, record, plain)
            check(plain, wanted_of(head))
        except (FormatError, LockedError, BadRecordError):
            self.torn += 1
            return False
        return True

    # ---- from record to record

    def _heads(self, fd: int, number: int, end: int) -> Iterator[Head]:
        """The heads in a segment; where one is bad, the next is looked for by page."""
        window = _Window(self._buffers.get(WINDOW_BYTES))
        offset, length, lost = PAGE_BYTES, 0, False
        while offset < end:
            data = self._read(fd, window, offset, length)
            try:
                frame, head = self._records.head(data, segment=number, offset=offset)
            except FormatError:
                self.torn += not lost and bool(head_bytes(data))
                lost = True
                offset += PAGE_BYTES
                continue
            lost, length = False, frame.length
            if offset + length > whole_pages(end):
                self.torn += 1
                return
            if head is not None:
                yield head
            self.locked += head is None and not frame.dead
            offset += length

    def _read(
        self, fd: int, window: _Window, offset: int, last_length: int
    ) -> memoryview:
        """The bytes at ``offset``, at least all of a head that starts there."""
        there = window.start + window.length - offset
        if offset < window.start or there < PAGE_BYTES:
            short = last_length > LONG_RECORD_BYTES
            self._fill(
                fd, window, offset, SHORT_WINDOW_BYTES if short else WINDOW_BYTES
            )
        data = window.data[offset - window.start : window.length]
        needed = whole_pages(head_bytes(data))
        if needed > len(data):
            self._fill(fd, window, offset, needed)
            data = window.data[: window.length]
        return data

    def _fill(self, fd: int, window: _Window, offset: int, length: int) -> None:
        if length > len(window.data):
            window.data = self._buffers.get(length)
        got = os.preadv(fd, [window.data[:length]], offset)
        window.start, window.length = offset, got


def wanted_of(head: Head) -> Verify:
    """What a record's image must be, by its own head."""
    header = head.header
    return Verify(
        slot=0,
        generation=header.generation,
        offset=FRAME_BYTES,
        slot_bytes=header.slot_bytes,
        header_bytes=head.frame.header_bytes,
        key=header.key,
        tags=header.tags,
        tokens=header.tokens,
        header_xxh3=head.header_xxh3,
    )


def _end(head: Head) -> int:
    return head.frame.offset + head.frame.length


def _found(head: Head) -> FoundRecord:
    frame, header = head.frame, head.header
    return FoundRecord(
        place=Place(frame.segment, frame.offset, frame.length),
        lsn=frame.lsn,
        key=header.key,
        tags=header.tags,
        tokens=header.tokens,
        slot_bytes=header.slot_bytes,
        header_bytes=frame.header_bytes,
        made=header.generation,
        header_xxh3=head.header_xxh3,
        written_ms=frame.written_ms,
    )
