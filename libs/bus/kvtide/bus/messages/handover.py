"""Prefill → decode: which slots will hold the new KV, and which parts are there.

``HandoverPlan`` → ``PartsReady`` for each layer of each chunk → ``PrefillDone`` or
``PrefillFailed`` (these two also go to the gateway). All may be lost: decode pulls the
whole state with ``HandoverPull`` → ``HandoverState`` after a silence, and ends with
``HandoverTaken`` → ``Ack``, upon which prefill lets go of its slots.
"""

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.kv import Located, NodeRef, RequestId, SlotRef

MOST_CHUNK_TIMES = 64


class HandoverSlot(msgspec.Struct, frozen=True, array_like=True):
    """Block number ``block`` of the prompt, ``tokens`` of it, will be in ``slot``."""

    block: int
    tokens: int
    slot: SlotRef


class HandoverCopy(msgspec.Struct, frozen=True, array_like=True):
    """Block number ``block`` of the prompt is in the pool already, as ``located``."""

    block: int
    located: Located


class PartSums(msgspec.Struct, frozen=True, array_like=True):
    """xxh3-64 of K and V of one layer of block number ``block``, as written."""

    block: int
    layer: int
    k_xxh3: int
    v_xxh3: int


class HandoverPlan(Message, frozen=True, tag="handover_plan"):
    """What prefill will compute. Blocks below ``first_block`` come from the pool.

    So do those in ``copies``: they were there when prefill asked for slots. A block
    that is in neither is not handed over: decode computes it.
    """

    request: RequestId
    attempt: int
    prefill: NodeRef
    first_block: int
    slots: tuple[HandoverSlot, ...]
    copies: tuple[HandoverCopy, ...] = ()


class PartsReady(Message, frozen=True, tag="parts_ready"):
    """These parts are in their slots. ``seq`` counts from 0 within the attempt."""

    request: RequestId
    attempt: int
    prefill: NodeRef
    seq: int
    parts: tuple[PartSums, ...]


class ChunkTime(msgspec.Struct, frozen=True, kw_only=True):
    """A computed chunk: its ``tokens``, and when it ended after the work's arrival."""

    tokens: int
    end_ms: float
    took_ms: float


class PrefillTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefill's time went, in milliseconds.

    ``chunks`` are the first ``MOST_CHUNK_TIMES``, in order.
    """

    queue_ms: float
    load_ms: float
    compute_ms: float
    chunks: tuple[ChunkTime, ...] = ()


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """Everything is computed and in the pool. Also what gateways report as usage.

    ``reused_tokens`` were really loaded from the pool (a miss makes it smaller than
    the placement said), ``computed_tokens`` were computed.
    """

    request: RequestId
    attempt: int
    prefill: NodeRef
    reused_tokens: int
    computed_tokens: int
    messages: int
    times: PrefillTimes


class PrefillFailed(Message, frozen=True, tag="prefill_failed"):
    """The prefill ends without its KV; the gateway decides what follows."""

    request: RequestId
    attempt: int
    prefill: NodeRef
    code: str
    reason: str


class HandoverPull(Message, frozen=True, tag="handover_pull"):
    """Decode asks for all that it may have missed."""

    request: RequestId
    attempt: int


class HandoverState(Message, frozen=True, tag="handover_state"):
    """All that prefill has said so far. ``plan`` is None before it began."""

    request: RequestId
    attempt: int
    plan: HandoverPlan | None
    parts: tuple[PartSums, ...]
    done: PrefillDone | None
    failed: PrefillFailed | None


class HandoverTaken(Message, frozen=True, tag="handover_taken"):
    """Decode has its own verified copy (or wants no more): let the slots go."""

    request: RequestId
    attempt: int
