"""What the SSD tier wants of its device, and what the device answers.

Each operation carries a number; its end carries the same one, exactly once.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvtide.kv import BlockKey, SpaceTags
from kvtide.store.checks import Verify
from kvtide.store.ssd.segments import Place


class Trouble(StrEnum):
    """Why an operation failed.

    ``corrupt``: the bytes that were to be read or copied are not what they should be.
    ``unreadable``: this record can't be read. ``unwritable`` and ``full``: writing
    failed, what is there can be read. ``gone``: the directory can't be read either.
    ``locked``: its tenant's key is destroyed, or can't be had now.
    """

    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    UNWRITABLE = "unwritable"
    FULL = "full"
    GONE = "gone"
    LOCKED = "locked"


@dataclass(frozen=True, slots=True)
class DeletedSpace:
    """Blocks of a tenant, a model, or both (None: any) written until ``until_ms``.

    ``until_ms`` is wall clock: what was written later is not meant.
    """

    tenant: bytes | None
    model: bytes | None
    until_ms: int

    def covers(self, tags: SpaceTags) -> bool:
        """Whether blocks with these tags are meant."""
        return (self.tenant is None or self.tenant == tags.tenant) and (
            self.model is None or self.model == tags.model
        )


@dataclass(frozen=True, slots=True)
class RemovedBlock:
    """One block as written until ``until_ms``, in wall clock."""

    key: BlockKey
    until_ms: int


Tombstone = DeletedSpace | RemovedBlock

# ---- commands


@dataclass(frozen=True, slots=True)
class OpenTier:
    """Lock the directory and say what is in it: ``Found`` …, then ``TierOpened``."""


@dataclass(frozen=True, slots=True)
class CloseTier:
    """Let go of the directory; what is under way ends by itself."""


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Copy a slot, verify the copy against ``wanted``, and write it at ``place``."""

    number: int
    place: Place
    lsn: int
    wanted: Verify


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """Read the record at ``source``, verify it, and write it at ``place``.

    ``wanted`` is as in ``ReadRecord``; ``source_lsn`` is the old record's number.
    """

    number: int
    source: Place
    source_lsn: int
    place: Place
    lsn: int
    wanted: Verify


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read and verify the record at ``place``, then copy it into a slot of the arena.

    ``wanted.slot`` and ``wanted.offset`` are the slot's; ``wanted.generation`` is that
    in the stored header. In the slot the header says ``generation`` instead.
    """

    number: int
    place: Place
    lsn: int
    wanted: Verify
    generation: int


@dataclass(frozen=True, slots=True)
class SealSegment:
    """Make the segment durable and mark it as complete; ``tail`` is its length."""

    segment: int
    tail: int


@dataclass(frozen=True, slots=True)
class DropSegment:
    """Remove the segment's file."""

    segment: int


@dataclass(frozen=True, slots=True)
class KillRecord:
    """Mark the record at ``place`` as dead, so that no scan finds it. Best effort."""

    place: Place
    lsn: int


@dataclass(frozen=True, slots=True)
class NoteDeleted:
    """Keep, durably, that these are deleted, for scans to come."""

    deleted: DeletedSpace


@dataclass(frozen=True, slots=True)
class NoteRemoved:
    """Keep, durably, that these blocks are removed: those written until ``until_ms``."""

    keys: tuple[BlockKey, ...]
    until_ms: int


FileCommand = (
    WriteRecord
    | MoveRecord
    | ReadRecord
    | SealSegment
    | DropSegment
    | KillRecord
    | NoteDeleted
    | NoteRemoved
)
"""What ``TierFiles.do`` does."""

SsdCommand = OpenTier | CloseTier | FileCommand


# ---- events


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record that an earlier life wrote, at ``written_ms`` by the wall clock."""

    place: Place
    lsn: int
    key: BlockKey
    tags: SpaceTags
    tokens: int
    slot_bytes: int
    header_bytes: int
    made: int
    header_xxh3: int
    written_ms: int


@dataclass(frozen=True, slots=True)
class Found:
    """A segment of an earlier life, and records in it. A segment may come in pieces.

    ``tail`` is its length, in the first piece; 0 in those after it.
    """

    segment: int
    tail: int
    records: tuple[FoundRecord, ...]


@dataclass(frozen=True, slots=True)
class TierOpened:
    """All that is there was found. ``torn`` records were dropped."""

    torn: int
    took_s: float
    direct: bool


@dataclass(frozen=True, slots=True)
class TierFailed:
    """The directory can't be used now."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecordDone:
    """A write, move or read ended. ``header_xxh3`` is of a read's new header."""

    number: int
    trouble: Trouble | None = None
    reason: str = ""
    header_xxh3: int = 0


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """A seal or a drop ended."""

    segment: int
    dropped: bool
    trouble: Trouble | None = None
    reason: str = ""


SsdEvent = Found | TierOpened | TierFailed | RecordDone | SegmentDone
