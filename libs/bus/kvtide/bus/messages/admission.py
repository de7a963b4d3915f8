"""Gateway ↔ conductor: where a request goes, or why it may not.

Request order: ``Admit`` → ``Placed`` or ``Rejected``; conductors tell one another of
a placement with ``PlacementMade`` (see gossip); ``RequestEnded`` closes the book.
"""

from enum import StrEnum

from kvtide.bus.messages.base import Message
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, RequestId, TenantId


class RejectCode(StrEnum):
    """Why a conductor refuses. Each is final for this attempt."""

    NO_WORKERS = "no_workers"
    OVERLOADED = "overloaded"
    TENANT_LIMIT = "tenant_limit"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    STALE_ATTEMPT = "stale_attempt"
    QUARANTINED = "quarantined"


class Admit(Message, frozen=True, tag="admit"):
    """Ask for a placement. Idempotent by (request, attempt).

    ``keys`` are the keys of the prompt's full blocks, front to back. ``excluded``
    are workers that an earlier attempt found dead, hung or refusing. ``digest`` is that
    of the model that the keys were made for: several may have one name. "": any.
    """

    request: RequestId
    attempt: int
    gateway: NodeRef
    tenant: TenantId
    model: str
    keys: tuple[BlockKey, ...]
    prompt_tokens: int
    max_new_tokens: int
    excluded: tuple[NodeId, ...] = ()
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    priority: int = 0
    digest: str = ""


class CandidateEstimate(Message, frozen=True, tag="candidate"):
    """What a placement on ``prefill`` and ``decode`` was predicted to cost."""

    prefill: NodeId
    decode: NodeId
    hit_tokens: int
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    ttft_ms: float
    tbt_ms: float


class Placed(Message, frozen=True, tag="placed"):
    """The placement. ``prefill`` is None when the whole prompt is in the pool.

    ``reuse`` are copies of the first ``len(reuse)`` keys, in order.
    """

    request: RequestId
    attempt: int
    prefill: NodeRef | None
    decode: NodeRef
    reuse: tuple[Located, ...]
    chosen: CandidateEstimate
    reason: str


class Rejected(Message, frozen=True, tag="rejected"):
    """No placement. ``retry_after_ms`` is None when trying again is pointless."""

    request: RequestId
    attempt: int
    code: RejectCode
    reason: str
    retry_after_ms: float | None = None


class Outcome(StrEnum):
    """How a request ended, for the book."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


class RequestEnded(Message, frozen=True, tag="request_ended"):
    """Gateway → conductors (broadcast): the terminal answer, with what really happened.

    Counts are tokens; ``ttft_ms`` is None when no token was sent.
    """

    request: RequestId
    attempt: int
    gateway: NodeRef
    tenant: TenantId
    model: str
    outcome: Outcome
    code: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    total_ms: float
    tbt_ms: float | None = None
