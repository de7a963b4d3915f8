"""What happens to a store, and what it wants done: the machine's two vocabularies."""

from dataclasses import dataclass

from kvtide.bus.messages import (
    Ack,
    BadCopy,
    BlocksChanged,
    BlocksStaged,
    DropExtras,
    Failure,
    LeaseRelease,
    Owned,
    PlacementMade,
    Presence,
    PresenceReply,
    PutBegin,
    PutCommit,
    PutCommitted,
    PutGranted,
    ReplicaReply,
    Replicate,
    SnapshotPage,
    SnapshotPull,
    StageBlocks,
)
from kvtide.kv import BlockKey, Located, NodeRef, SpaceTags, Tier
from kvtide.store.checks import Verified, Verify
from kvtide.store.curation_messages import CurationAnswer, CurationRequest
from kvtide.store.fetches import ArrivalCommand, ArrivalEvent
from kvtide.store.ssd.events import SsdCommand, SsdEvent

StoreRequest = (
    PutBegin
    | PutCommit
    | LeaseRelease
    | Owned
    | Presence
    | SnapshotPull
    | BadCopy
    | PlacementMade
    | Replicate
    | DropExtras
    | StageBlocks
    | CurationRequest
)
"""The messages that a store's machine understands."""

StoreAnswer = (
    Ack
    | Failure
    | PutGranted
    | PutCommitted
    | PresenceReply
    | SnapshotPage
    | ReplicaReply
    | BlocksStaged
    | CurationAnswer
)
"""What it answers."""


# ---- events


@dataclass(frozen=True, slots=True)
class Received:
    """A message came. ``token`` names the waiting asker; None: nobody waits.

    ``wall_ms`` is the store's wall clock, for what must hold in later lives too.
    """

    message: StoreRequest
    sender: NodeRef
    token: int | None = None
    wall_ms: int = 0


@dataclass(frozen=True, slots=True)
class OwnerUp:
    """The roster knows this life of a node; lives before it are over."""

    owner: NodeRef


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """The roster says that this life of a node is over."""

    owner: NodeRef


@dataclass(frozen=True, slots=True)
class ConnectionGone:
    """The last transfer connection of a process has ended.

    ``owner`` is the process's first life: it may have fenced itself since.
    """

    owner: NodeRef


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The arena may have memory behind that many bytes: the host needs the rest."""

    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; needed no later than ``StoreMachine.wake_at_s``."""


@dataclass(frozen=True, slots=True)
class Deaf:
    """The store could hear nobody until now: silence says nothing of the others."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The store is about to end: what only DRAM has is to be written to the SSD."""


Event = (
    Received
    | Verified
    | OwnerUp
    | OwnerGone
    | ConnectionGone
    | Deaf
    | Tick
    | Flush
    | MemoryLimit
    | ArrivalEvent
    | SsdEvent
)


# ---- commands


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the asker ``token``."""

    token: int
    message: StoreAnswer


@dataclass(frozen=True, slots=True)
class Gossip:
    """Tell everyone, in this order."""

    message: BlocksChanged


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row of the catalog: one copy that came."""

    located: Located
    tier: Tier
    tokens: int
    tags: SpaceTags


@dataclass(frozen=True, slots=True)
class GoneRow:
    """The copy of ``key`` with this generation went, and why."""

    key: BlockKey
    generation: int
    reason: str
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Keep the catalog up to date, some time; ``gone`` before ``came``."""

    came: tuple[BlockRow, ...]
    gone: tuple[GoneRow, ...]


Command = Reply | Gossip | Verify | WriteRows | ArrivalCommand | SsdCommand
