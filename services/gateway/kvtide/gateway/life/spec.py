"""What is asked for, within which limits, and what it cost. Plain values."""

from dataclasses import dataclass
from enum import StrEnum

from kvtide.bus.messages import SamplingSpec
from kvtide.kv import BlockKey, NodeRef, RequestId, TenantId


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One answer to be made. Never changes, whatever happens to its attempts.

    ``keys`` are those of the full blocks of ``prompt``. ``stop_token_ids`` end the
    answer; the model's own end tokens are among them unless ``ignore_eos``. Limits are
    those of ``tenant``; blocks are kept in the name of ``cache_owner``, if it is another.
    ``pictures`` are files, in the order of the prompt's tokens that stand for them; such a
    prompt has no ``keys``: its KV depends on more than its tokens. ``digest`` is the
    model's, for which ``keys`` were made.
    """

    request: RequestId
    gateway: NodeRef
    tenant: TenantId
    salt: str
    model: str
    prompt: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    sampling: SamplingSpec
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    priority: int = 0
    cache_owner: TenantId | None = None
    pictures: tuple[bytes, ...] = ()
    digest: str = ""

    @property
    def picture_bytes(self) -> int:
        """What its pictures take."""
        return sum(map(len, self.pictures))


@dataclass(frozen=True, slots=True)
class LifeLimits:
    """Every wait of a request, in seconds, and every count that bounds it.

    ``deaths``: so many workers that die with a request one after the other, without a
    token between them, and it is refused.
    ``again_limit_s``: a request that lost its workers waits this long for others, or
    for theirs to be started again, and asks at intervals that grow from
    ``again_first_s`` to ``again_most_s``.
    """

    deadline_s: float = 600.0
    placements: int = 3
    deaths: int = 2
    admit_patience_s: float = 0.25
    admit_limit_s: float = 5.0
    again_limit_s: float = 30.0
    again_first_s: float = 0.1
    again_most_s: float = 0.8
    work_patience_s: float = 5.0
    silence_s: float = 1.0
    pull_patience_s: float = 0.25
    unanswered_s: float = 10.0
    ack_tokens: int = 32
    ack_s: float = 0.5
    cancel_repeat_s: float = 0.5
    cancel_limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a finished answer cost, in tokens.

    ``cached_tokens`` is the part of the prompt whose KV came from the pool.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class FailureKind(StrEnum):
    """Why a request ends without an answer."""

    OVERLOADED = "overloaded"
    NO_WORKERS = "no_workers"
    NO_CONDUCTOR = "no_conductor"
    TENANT_LIMIT = "tenant_limit"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    QUARANTINED = "quarantined"
    WORKERS_FAILED = "workers_failed"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The terminal error of a request. ``retry_after_ms`` None: it won't help."""

    kind: FailureKind
    reason: str
    retry_after_ms: float | None = None
