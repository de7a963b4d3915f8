"""What is asked of a read, and what comes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtide.kv import Located, SlotRef

PartSink = Callable[[int], memoryview]
"""Part number (``layer * 2 + kind``) → writable memory for that part of one block."""


class MissReason(StrEnum):
    """Why a copy could not be had. Every one of them means: compute it."""

    STORE_GONE = "store_gone"
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed_out"
    STALE = "stale"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    NOT_STAGED = "not_staged"


@dataclass(frozen=True, slots=True)
class PartRead:
    """One part to be read: ``into`` is ``tokens * layout.token_bytes`` long.

    ``xxh3`` is what it must hash to. ``located``, if the part is of a keyed block,
    lets a bad copy be reported to its store.
    """

    slot: SlotRef
    part: int
    xxh3: int
    into: memoryview
    located: Located | None = None


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """What came of one read. After a miss the target's content is undefined."""

    miss: MissReason | None = None
    nbytes: int = 0
    path: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """The bytes are there and verified."""
        return self.miss is None
