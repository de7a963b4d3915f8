"""Copies of blocks at other stores: made on a conductor's word, or before a store leaves.

``Replicate`` has a store copy blocks from others, some time and in the background;
that a copy is there is told as any block is, by ``BlocksChanged``. ``DrainBegin`` has a
store move what only it has and leave; its ``DrainState`` says how far it is.
"""

from enum import StrEnum

from kvtide.bus.messages.base import Message
from kvtide.kv import BlockKey, Located


class ReplicaReason(StrEnum):
    """Why a copy is wanted. All but ``drain`` make an extra copy, which goes first."""

    PLACEMENT = "placement"
    HEAT = "heat"
    FILL = "fill"
    DRAIN = "drain"


class Replicate(Message, frozen=True, tag="replicate"):
    """Copy these, most wanted first. → ``ReplicaReply`` if asked.

    Entries of one key are other sources of it, best first. What is here already is
    not copied; for a drain it is no extra copy any more.
    """

    reason: ReplicaReason
    located: tuple[Located, ...]


class ReplicaReply(Message, frozen=True, tag="replica_reply"):
    """How many of the keys are ``here``, how many will be copied, and the rest."""

    here: int
    queued: int
    refused: int


class DropExtras(Message, frozen=True, tag="drop_extras"):
    """These are cold: drop those of them that are extra copies."""

    keys: tuple[BlockKey, ...]


class DrainBegin(Message, frozen=True, tag="drain_begin"):
    """Take no new blocks, move what only you have, then leave → ``DrainState``.

    ``force``: leave without what no other store has room for. Idempotent; a later one
    may add ``force``.
    """

    force: bool = False


class DrainCancel(Message, frozen=True, tag="drain_cancel"):
    """Stay after all → ``DrainState``. Copies that were made stay too."""


class DrainQuery(Message, frozen=True, tag="drain_query"):
    """→ ``DrainState``."""


class DrainPhase(StrEnum):
    """How far a drain is. ``no_room`` waits for room, for ``force``, or for a cancel.

    ``drained``: it left, was started again, and stays out until a cancel.
    """

    IDLE = "idle"
    LOOKING = "looking"
    MOVING = "moving"
    NO_ROOM = "no_room"
    FINISHING = "finishing"
    LEAVING = "leaving"
    DRAINED = "drained"


class DrainState(Message, frozen=True, tag="drain_state"):
    """The progress of a drain.

    ``blocks`` are here; ``left`` of them are nowhere else yet; ``moved`` got a copy
    elsewhere since the drain began; ``leases`` are still held by workers here.
    """

    phase: DrainPhase
    blocks: int = 0
    left: int = 0
    left_bytes: int = 0
    moved: int = 0
    moved_bytes: int = 0
    leases: int = 0
    reason: str = ""
