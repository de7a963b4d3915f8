"""What lies on the SSD, byte for byte. Little-endian; everything starts on a page.

A directory has a ``superblock`` and segments. A segment starts with a page of its own;
records follow, one after the other, each padded with zeros to whole pages:

======= ===== ==============================================================
offset  bytes field of a record
======= ===== ==============================================================
0       8     xxh3-64 of bytes 8 to 64 and the block's header, seeded by the directory
8       4     magic ``KVTR``
12      2     format version
14      2     flags: 1 = dead, to be skipped
16      8     number of the segment
24      8     offset of this record in it
32      8     log sequence number: of two records of a key the greater counts
40      8     length of the slot's image
48      4     length of the block's header
52      4     zero
56      8     wall clock in ms when it was written, to compare with deletions
64            the slot's image: the block's header (key, tags, table of its parts), its parts
======= ===== ==============================================================

The parts are covered by the checksums in the block's header, so a scan that reads only
heads knows what each record is, and a reader knows whether its bytes are right.

A sealed record (format version 2) has, where the image would start:

======= ===== ==============================================================
64      16    id of the tenant's key
80      16    life of the directory in which it was sealed
96      8     count of the record in that life
104     8     zero
112           the block's header, AES-256-GCM, its tag of 16 bytes behind it
…             the rest of the image, the same
======= ===== ==============================================================

Its frame's sum covers bytes 8 to 112. The frame (without sum and flags) and the
envelope behind it are associated data of both messages; see ``sealing`` for the keys.
"""

import struct
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from kvtide.kv import BlockHeader, HeaderMismatchError
from kvtide.store.ssd.errors import FormatError

PAGE_BYTES = 4096
FRAME_BYTES = 64
FORMAT_VERSION = 1
DIRECTORY_ID_BYTES = 16
SEALED_VERSION = 2
ENVELOPE_BYTES = 48
TAG_BYTES = 16
MAX_HEADER_BYTES = 1 << 20

_SUPERBLOCK = struct.Struct("<Q4sHH16sQ")
_SEGMENT = struct.Struct("<Q4sHH16sQQ")
_FRAME = struct.Struct("<Q4sHHQQQQIIQ")
_ENVELOPE = struct.Struct("<16s16sQQ")
_SUM_BYTES = 8
_DEAD = 1


def whole_pages(length: int) -> int:
    """``length`` rounded up to pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def record_bytes(slot_bytes: int, *, sealed: bool = False) -> int:
    """What a slot's image takes on the SSD."""
    extra = ENVELOPE_BYTES + 2 * TAG_BYTES if sealed else 0
    return whole_pages(FRAME_BYTES + extra + slot_bytes)


def seed_of(directory: bytes) -> int:
    """What seeds the checksums, so that another directory's records are none here."""
    return int.from_bytes(directory[:8], "little")


@dataclass(frozen=True, slots=True)
class Superblock:
    """Whose directory it is. ``key_id`` tells one cluster's block keys from another's."""

    node: str
    key_id: int
    directory: bytes

    def encode(self) -> bytes:
        """One page."""
        name = self.node.encode()
        body = _SUPERBLOCK.pack(
            0, b"KVTS", FORMAT_VERSION, len(name), self.directory, self.key_id
        )
        page = (body[_SUM_BYTES:] + name).ljust(PAGE_BYTES - _SUM_BYTES, b"\0")
        return xxh3_64_intdigest(page).to_bytes(_SUM_BYTES, "little") + page

    @classmethod
    def decode(cls, page: bytes) -> "Superblock":
        """Read it.

        Raises:
            FormatError: it is torn, of another format, or none at all.
        """
        if len(page) != PAGE_BYTES:
            raise FormatError(f"a superblock has {PAGE_BYTES} bytes, not {len(page)}")
        found, magic, version, length, directory, key_id = _SUPERBLOCK.unpack_from(page)
        if magic != b"KVTS":
            raise FormatError("this is no superblock")
        if version != FORMAT_VERSION:
            raise FormatError(
                f"format version {version} is not {FORMAT_VERSION}, which this one reads"
            )
        if xxh3_64_intdigest(page[_SUM_BYTES:]) != found:
            raise FormatError("the superblock's checksum differs")
        name = page[_SUPERBLOCK.size : _SUPERBLOCK.size + length]
        return cls(name.decode(errors="replace"), key_id, directory)


def segment_page(directory: bytes, number: int, tail: int = 0) -> bytes:
    """The first page of a segment; with ``tail``, its length, it is a sealed one's."""
    body = _SEGMENT.pack(0, b"KVTG", FORMAT_VERSION, 0, directory, number, tail)
    page = body[_SUM_BYTES:].ljust(PAGE_BYTES - _SUM_BYTES, b"\0")
    return xxh3_64_intdigest(page).to_bytes(_SUM_BYTES, "little") + page


def sealed_tail(page: bytes, directory: bytes, number: int) -> int:
    """The length of the segment if this is its first page, and sealed; else 0."""
    if len(page) != PAGE_BYTES:
        return 0
    tail = int(_SEGMENT.unpack_from(page)[-1])
    return tail if page == segment_page(directory, number, tail) else 0


@dataclass(frozen=True, slots=True)
class Envelope:
    """Which key a record is sealed with. ``life`` and ``count`` make its nonces."""

    key_id: bytes
    life: bytes
    count: int

    def encode(self) -> bytes:
        """``ENVELOPE_BYTES``."""
        return _ENVELOPE.pack(self.key_id, self.life, self.count, 0)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "Envelope":
        """From a record's bytes behind its frame, whose sum was found right."""
        key_id, life, count, _ = _ENVELOPE.unpack_from(data)
        return cls(key_id, life, count)


@dataclass(frozen=True, slots=True)
class Frame:
    """What a record says of itself before its image."""

    segment: int
    offset: int
    lsn: int
    slot_bytes: int
    header_bytes: int
    written_ms: int
    dead: bool = False
    sealed: bool = False

    @property
    def length(self) -> int:
        """The record's pages in bytes."""
        return record_bytes(self.slot_bytes, sealed=self.sealed)

    @property
    def covered_bytes(self) -> int:
        """How much behind the frame its sum covers: the header, or the envelope."""
        return ENVELOPE_BYTES if self.sealed else self.header_bytes

    def associated(self, envelope: Envelope) -> bytes:
        """What is authenticated with a sealed image; the same when it is dead."""
        alive = replace(self, dead=False).encode(b"", 0)
        return alive[_SUM_BYTES:] + envelope.encode()

    def encode(self, covered: bytes | memoryview, seed: int) -> bytes:
        """The first ``FRAME_BYTES``; ``covered`` are the ``covered_bytes`` behind."""
        frame = _FRAME.pack(
            0,
            b"KVTR",
            SEALED_VERSION if self.sealed else FORMAT_VERSION,
            _DEAD if self.dead else 0,
            self.segment,
            self.offset,
            self.lsn,
            self.slot_bytes,
            self.header_bytes,
            0,
            self.written_ms,
        )
        digest = xxh3_64_intdigest(frame[_SUM_BYTES:] + bytes(covered), seed=seed)
        return digest.to_bytes(_SUM_BYTES, "little") + frame[_SUM_BYTES:]


@dataclass(frozen=True, slots=True)
class Head:
    """A record's head, found good: its frame and the header of its block."""

    frame: Frame
    header: BlockHeader
    header_xxh3: int


def head_bytes(data: bytes | memoryview) -> int:
    """How many bytes ``head_of`` needs, going by what may be a frame; 0: it is none."""
    if len(data) < FRAME_BYTES:
        return 0
    fields = _FRAME.unpack_from(data)
    header_bytes = int(fields[8])
    if fields[1] != b"KVTR" or not 0 < header_bytes <= MAX_HEADER_BYTES:
        return 0
    sealed = fields[2] == SEALED_VERSION
    return FRAME_BYTES + header_bytes + sealed * (ENVELOPE_BYTES + TAG_BYTES)


def check_frame(
    data: bytes | memoryview, *, segment: int, offset: int, seed: int
) -> Frame:
    """The frame of the record that should lie at ``offset`` of ``segment``.

    The block's header behind it, or the envelope, is covered by the same checksum.

    Raises:
        FormatError: there is none, it is torn, or it belongs elsewhere.
    """
    needed = head_bytes(data)
    if needed == 0 or len(data) < needed:
        raise FormatError("no record starts here")
    (found, _, version, flags, *numbers, _, written_ms) = _FRAME.unpack_from(data)
    segment_found, offset_found, lsn, slot_bytes, header_bytes = numbers
    frame = Frame(
        segment,
        offset,
        lsn,
        slot_bytes,
        header_bytes,
        written_ms,
        bool(flags & _DEAD),
        version == SEALED_VERSION,
    )
    covered = data[_SUM_BYTES : FRAME_BYTES + frame.covered_bytes]
    known = version in (FORMAT_VERSION, SEALED_VERSION)
    if xxh3_64_intdigest(bytes(covered), seed=seed) != found or not known:
        raise FormatError("the checksum of the record's head differs")
    if (segment_found, offset_found) != (segment, offset):
        raise FormatError(f"this record belongs to {segment_found}:{offset_found}")
    if header_bytes > slot_bytes:
        raise FormatError("the record's lengths contradict each other")
    return frame


def head_of(frame: Frame, raw: bytes) -> Head:
    """A record's head, of its frame and the bytes of its block's header.

    Raises:
        FormatError: these bytes are no header, or of another length.
    """
    try:
        header = BlockHeader.decode(raw)
    except HeaderMismatchError as error:
        raise FormatError(str(error)) from error
    if header.slot_bytes != frame.slot_bytes:
        raise FormatError("the record's lengths contradict each other")
    return Head(frame, header, xxh3_64_intdigest(raw))
