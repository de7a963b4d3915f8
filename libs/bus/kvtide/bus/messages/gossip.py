"""To everyone: which blocks came and went where, and what was placed.

A store counts its ``BlocksChanged`` by ``seq`` within its epoch; a receiver that sees a
gap, or a new epoch, pulls a snapshot: ``SnapshotPull`` → ``SnapshotPage`` until
``next_key`` is None, applying changes after each page's ``seq``.
"""

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, RequestId, TenantId


class Dropped(msgspec.Struct, frozen=True, array_like=True):
    """The copy of ``key`` in the slot's use ``generation`` is gone."""

    key: BlockKey
    generation: int


class BlocksChanged(Message, frozen=True, tag="blocks_changed"):
    """Changes number ``seq`` of one life of a store; drops apply before adds."""

    store: NodeRef
    seq: int
    added: tuple[Located, ...]
    dropped: tuple[Dropped, ...]


class SnapshotPull(Message, frozen=True, tag="snapshot_pull"):
    """The next page of what a store holds, by key, after ``after`` (None: the start)."""

    after: BlockKey | None
    limit: int


class SnapshotPage(Message, frozen=True, tag="snapshot_page"):
    """Copies with keys in (after, next_key], true at change number ``seq``."""

    store: NodeRef
    seq: int
    located: tuple[Located, ...]
    next_key: BlockKey | None


class PlacementMade(Message, frozen=True, tag="placement_made"):
    """A conductor placed a request: others book it, stores keep ``keys`` warm.

    ``hold_ms`` is how long the reused blocks are expected to be needed, ``transfer_ms``
    how long they are loaded from ``sources`` once their turn comes. ``ttft_ms`` and
    ``tbt_ms`` are predictions.
    """

    conductor: NodeRef
    request: RequestId
    attempt: int
    gateway: NodeRef
    model: str
    prefill: NodeId | None
    decode: NodeId
    new_tokens: int
    prompt_tokens: int
    max_new_tokens: int
    prefill_ms: float
    keys: tuple[BlockKey, ...]
    hold_ms: float
    tenant: TenantId = TenantId("")
    transfer_ms: float = 0.0
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    sources: tuple[NodeId, ...] = ()
