"""Worker ↔ the store on its host: slots to write into, leases, bad copies.

``PutBegin`` → ``PutGranted``; the writer fills the slots; ``PutCommit`` →
``PutCommitted``; ``LeaseRelease`` → ``Ack`` ends the lease and the pins it had. A lease
that its owner does not list (``Owned``) twice running, or whose owner is gone, expires.
``StageBlocks`` → ``BlocksStaged`` comes from any reader, on any host, for blocks on SSD.
"""

from enum import StrEnum

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.kv import BlockKey, Lease, Located, SlotRef, SpaceTags


class PutBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block to be written: ``key`` is None for a private one, ``tokens`` its fill."""

    key: BlockKey | None
    tokens: int


class PutBegin(Message, frozen=True, tag="put_begin"):
    """Ask for slots of ``slot_bytes``. Idempotent by (lease, put)."""

    lease: Lease
    put: int
    tags: SpaceTags
    slot_bytes: int
    header_bytes: int
    blocks: tuple[PutBlock, ...]


class PutSlot(msgspec.Struct, frozen=True, array_like=True):
    """The answer for one block, in order.

    ``slot`` is where to write it. ``existing`` is set when a committed copy is here
    already, and then pinned for the lease: still write ``slot`` if it is given (a
    private copy for the hand-over), else nothing needs to be written. Both None: no
    room; the block is not pooled.
    """

    slot: SlotRef | None
    existing: Located | None = None


class PutGranted(Message, frozen=True, tag="put_granted"):
    """Slots, one answer for each block asked for."""

    put: int
    slots: tuple[PutSlot, ...]


class CommitBlock(msgspec.Struct, frozen=True, array_like=True):
    """A slot that is written, header last, and what its header hashes to."""

    slot: SlotRef
    header_xxh3: int


class PutCommit(Message, frozen=True, tag="put_commit"):
    """The writer has filled these. The store verifies every part before it agrees."""

    lease: Lease
    blocks: tuple[CommitBlock, ...]


class BlockState(StrEnum):
    """What became of a committed block."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    STALE = "stale"
    CORRUPT = "corrupt"


class PutCommitted(Message, frozen=True, tag="put_committed"):
    """The state of each block of the commit, in order."""

    states: tuple[BlockState, ...]


class LeaseRelease(Message, frozen=True, tag="lease_release"):
    """The lease ends: unwritten and private slots are freed, pins end."""

    lease: Lease


class Presence(Message, frozen=True, tag="presence"):
    """How much of this chain is here? → ``PresenceReply``."""

    keys: tuple[BlockKey, ...]


class PresenceReply(Message, frozen=True, tag="presence_reply"):
    """Copies of the first ``len(located)`` keys; the next key is not here."""

    located: tuple[Located, ...]


class StageBlocks(Message, frozen=True, tag="stage_blocks"):
    """Bring blocks of this store's SSD into its DRAM, to be read from there.

    They are pinned for the lease, which the reader ends with ``LeaseRelease`` as soon as
    it has read them. The answer comes when all are there, or after ``wait_ms`` with
    what is there then. → ``BlocksStaged``. Idempotent.
    """

    lease: Lease
    keys: tuple[BlockKey, ...]
    wait_ms: float


class BlocksStaged(Message, frozen=True, tag="blocks_staged"):
    """A copy in DRAM for each key, in order; None: it can't be had: compute it."""

    located: tuple[Located | None, ...]


class BadCopy(Message, frozen=True, tag="bad_copy"):
    """A reader's verification failed. The store checks for itself and quarantines."""

    located: Located
    reason: str
