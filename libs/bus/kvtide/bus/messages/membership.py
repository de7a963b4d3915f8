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


class Bound(StrEnum):
    """What an engine step mostly waits for.

    ``MEMORY``: reading the weights, whatever the batch; ``COMPUTE``: its tokens' work.
    """

    COMPUTE = "compute"
    MEMORY = "memory"


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured engine step, for cost models to be fitted to.

    ``rows`` sequences had ``new`` tokens computed, which attended to ``attended`` pairs
    of (new token, token before it or itself) in all: of a prefill chunk from ``start``
    to ``end`` that is ``(end - start) * (start + end + 1) / 2``, of a decode row its KV
    tokens.
    """

    rows: int
    new: int
    attended: float
    ms: float


class LoadSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured load of blocks, from this host and from others.

    ``flows`` is how many other loads from far were under way.
    """

    near_bytes: int
    far_bytes: int
    flows: int
    ms: float


class PrefillLoad(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="prefill"
):
    """A prefill worker's queue. Rates are measured, 0 before anything was.

    ``tokens_per_s`` are computed tokens of a step's time, ``reused_tokens_per_s`` and
    ``load_bytes_per_s`` loaded ones of a load's. ``queue_ms`` is when a prompt that
    came now is predicted to begin. ``loads`` counts loads since the start, ``load`` is
    the last one. ``step`` is the last step; ``busy_share`` is the
    recent share of time in which the engine computed a step for this role.
    """

    queued: int = 0
    queued_tokens: int = 0
    running: int = 0
    running_tokens_left: int = 0
    tokens_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    reused_tokens_per_s: float = 0.0
    queue_ms: float = 0.0
    loads: int = 0
    load: LoadSample | None = None
    step: StepSample | None = None
    busy_share: float = 0.0
    bound: Bound | None = None


class DecodeLoad(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="decode"
):
    """A decode worker's batch and memory. ``step_ms`` is the recent mean.

    ``kv_tokens_used`` are bound to sequences, ``kv_tokens_promised`` to ones that wait.
    ``fill_tokens`` are those of prompts that it has yet to compute itself, a few a step.
    ``tbt_ms`` is the tightest target of those that run (0: none has one), and
    ``preempted`` counts those that had to give their memory up for a while, since the
    start. ``step``, ``busy_share`` and ``bound`` as in ``PrefillLoad``.
    """

    waiting: int = 0
    running: int = 0
    kv_tokens_used: int = 0
    kv_tokens_promised: int = 0
    kv_tokens_capacity: int = 0
    step_ms: float = 0.0
    tbt_ms: float = 0.0
    preempted: int = 0
    step: StepSample | None = None
    busy_share: float = 0.0
    bound: Bound | None = None
    fill_tokens: int = 0


class StoreLoad(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="store"):
    """A store's slots and bytes. free + used + reserved + quarantined = total.

    ``backed_bytes`` of the arena's ``capacity_bytes`` have memory behind them. ``pins``
    are slots that leases pin, ``hard_pins`` and ``soft_pins`` those that people do.
    On the SSD ``free + used + reserved + garbage = total`` in bytes; ``ssd_state`` is
    ``off``, ``opening``, ``ready``, ``read_only`` or ``out``, ``ssd_reason`` why.
    """

    total_slots: int = 0
    free_slots: int = 0
    used_slots: int = 0
    reserved_slots: int = 0
    quarantined_slots: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    backed_bytes: int = 0
    leases: int = 0
    pins: int = 0
    hard_pins: int = 0
    soft_pins: int = 0
    tenants: int = 0
    seq: int = 0
    ssd_state: str = "off"
    ssd_reason: str = ""
    ssd_blocks: int = 0
    ssd_total_bytes: int = 0
    ssd_free_bytes: int = 0
    ssd_used_bytes: int = 0
    ssd_reserved_bytes: int = 0
    ssd_garbage_bytes: int = 0


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
    ``protocol`` is the version of these messages. Workers of one ``worker_class`` are
    equally fast; "" is not known. ``capable`` are the roles that a worker could have.
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
    worker_class: str = ""
    capable: tuple[Role, ...] = ()


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The node ends by itself and holds nothing any more."""

    node: NodeRef


class ChangeRoles(Message, frozen=True, tag="change_roles"):
    """Conductor → a worker: do these roles from now on → ``Ack`` or ``Failure``.

    What the worker no longer does it finishes first; its beats say at once which roles
    take work. ``worker`` is the life that is meant. Idempotent.
    """

    worker: NodeRef
    roles: tuple[Role, ...]


class ArenaGrant(Message, frozen=True, tag="arena_grant"):
    """Store → a worker on its host: the right to write into these arenas."""

    store: NodeRef
    arenas: tuple[RegionHandle, ...]


class ArenaRequest(Message, frozen=True, tag="arena_request"):
    """Worker → the store on its host → ``ArenaGrant`` or ``Failure``."""

    worker: NodeRef
    host: str
