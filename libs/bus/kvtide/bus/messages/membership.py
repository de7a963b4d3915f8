"""Everyone → everyone: I live, this is what I am and how loaded.

A ``Beat`` every half second from a thread of its own, so that a busy engine is not
taken for a dead one; ``steps`` grows with the engine's work, so that a hung one is not
taken for a live one. ``Goodbye`` at a clean end.
"""

from enum import StrEnum

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.kv import ModelFacts, NodeRef, Role
from kvtide.transfer import EndpointAddress, RegionHandle


class NodeState(StrEnum):
    """What a node is ready for."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class PrefillLoad(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="prefill"
):
    """A prefill worker's queue. Rates are tokens per second, measured."""

    queued: int = 0
    queued_tokens: int = 0
    running: int = 0
    running_tokens_left: int = 0
    tokens_per_s: float = 0.0
    load_bytes_per_s: float = 0.0


class DecodeLoad(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="decode"
):
    """A decode worker's batch and memory. ``step_ms`` is the recent mean."""

    waiting: int = 0
    running: int = 0
    kv_tokens_used: int = 0
    kv_tokens_promised: int = 0
    kv_tokens_capacity: int = 0
    step_ms: float = 0.0


class StoreLoad(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="store"):
    """A store's slots and bytes. free + used + reserved + quarantined = total."""

    total_slots: int = 0
    free_slots: int = 0
    used_slots: int = 0
    reserved_slots: int = 0
    quarantined_slots: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    leases: int = 0
    pins: int = 0
    seq: int = 0


class GatewayLoad(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="gateway"
):
    """A gateway's open requests."""

    open_requests: int = 0


class ConductorLoad(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="conductor"
):
    """What a conductor knows. ``exact`` is false while an index catches up."""

    indexed_blocks: int = 0
    bookings: int = 0
    exact: bool = True


Load = PrefillLoad | DecodeLoad | StoreLoad | GatewayLoad | ConductorLoad


class Beat(Message, frozen=True, tag="beat"):
    """A sign of life. ``seq`` grows with each beat of an epoch.

    ``host`` is equal for nodes that share memory (the transfer library's
    ``shm_host``). ``arenas`` are a store's arenas as read capabilities, position =
    ``SlotRef.arena``; workers on its host ask for write ones (``ArenaRequest``).
    ``protocol`` is the version of these messages.
    """

    node: NodeRef
    roles: tuple[Role, ...]
    seq: int
    host: str
    state: NodeState
    steps: int
    load: tuple[Load, ...]
    transfer: EndpointAddress | None = None
    arenas: tuple[RegionHandle, ...] = ()
    models: tuple[ModelFacts, ...] = ()
    http: str = ""
    protocol: int = 1
    started_wall_s: float = 0.0


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The node ends by itself and holds nothing any more."""

    node: NodeRef


class ArenaGrant(Message, frozen=True, tag="arena_grant"):
    """Store → a worker on its host: the right to write into these arenas."""

    store: NodeRef
    arenas: tuple[RegionHandle, ...]


class ArenaRequest(Message, frozen=True, tag="arena_request"):
    """Worker → the store on its host → ``ArenaGrant`` or ``Failure``."""

    worker: NodeRef
    host: str
