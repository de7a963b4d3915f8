"""Gateway → workers: do this, stop that, this is all I own at yours.

``PrefillWork`` / ``DecodeWork`` / ``PictureWork`` → ``WorkAccepted`` or ``WorkRefused``;
``Cancel`` → ``Ack``; ``Owned`` once a second, no answer. Idempotent by (request, attempt); a cancel
that comes before its work leaves a tombstone.
"""

from enum import StrEnum

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.bus.messages.sampling import SamplingSpec
from kvtide.kv import (
    BlockKey,
    Located,
    NodeRef,
    RequestId,
    RequestRef,
    TenantId,
)


class PrefillWork(Message, frozen=True, tag="prefill_work"):
    """Make the KV of ``tokens[:-1]``: load ``reuse``, compute the rest, hand it over.

    ``worker`` is the life that was chosen: a later life of the node refuses it.

    ``keys`` are those of the full blocks of ``tokens`` (the last token's KV is made by
    decode, which feeds it). ``salt`` and ``tenant`` name the key space. ``ttft_ms`` is
    the client's target, None if it has none; after ``deadline_ms`` nobody waits.
    """

    request: RequestId
    attempt: int
    gateway: NodeRef
    tenant: TenantId
    salt: str
    model: str
    tokens: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    reuse: tuple[Located, ...]
    decode: NodeRef
    deadline_ms: float
    worker: NodeRef | None = None
    ttft_ms: float | None = None


class DecodeWork(Message, frozen=True, tag="decode_work"):
    """Pull the KV of ``tokens[:-1]``, feed the last token, and generate.

    ``tokens`` are the original prompt (``prompt_tokens`` long) followed by what
    earlier attempts generated: generation goes on at index
    ``len(tokens) - prompt_tokens`` of the answer. ``max_new_tokens`` counts the whole
    answer, earlier attempts included. ``stop_token_ids`` end the answer unless
    ``ignore_eos``. ``prefill`` is None when everything is in the pool. ``worker`` is the
    life that was chosen: a later life of the node refuses it. ``tbt_ms`` is the client's
    target for the time between two tokens, None if it has none.
    """

    request: RequestId
    attempt: int
    gateway: NodeRef
    tenant: TenantId
    salt: str
    model: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    keys: tuple[BlockKey, ...]
    reuse: tuple[Located, ...]
    prefill: NodeRef | None
    sampling: SamplingSpec
    max_new_tokens: int
    deadline_ms: float
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    worker: NodeRef | None = None
    tbt_ms: float | None = None


class PictureWork(DecodeWork, frozen=True, kw_only=True, tag="picture_work"):
    """The same for a prompt with pictures, which a ``DecodeWork`` never has.

    A message of its own, so that a worker that does not know of pictures can't take the
    work and leave them out. ``pictures`` are whole PNG, JPEG or WebP files, in the order
    of the tokens that stand for them, one each, which the engine makes more of. ``keys``
    and ``reuse`` are empty, for keys are made of tokens alone, and so is ``prefill``:
    decode computes the prompt.
    """

    pictures: tuple[bytes, ...]

    @classmethod
    def of(cls, work: DecodeWork, pictures: tuple[bytes, ...]) -> "PictureWork":
        """The work with these pictures."""
        return cls(**msgspec.structs.asdict(work), pictures=pictures)


class WorkAccepted(Message, frozen=True, tag="work_accepted"):
    """The worker has taken it; ``start_ms`` is when it expects to begin."""

    request: RequestId
    attempt: int
    start_ms: float


class RefuseCode(StrEnum):
    """Why a worker refuses.

    All but ``STALE_ATTEMPT``, ``TOO_LARGE`` and ``UNSUPPORTED`` may pass elsewhere. The
    last one: the engine can't do what was asked; the reason says what to ask instead.
    """

    BUSY = "busy"
    DRAINING = "draining"
    LOADING = "loading"
    TOO_LARGE = "too_large"
    UNKNOWN_MODEL = "unknown_model"
    STALE_ATTEMPT = "stale_attempt"
    OTHER_LIFE = "other_life"
    CANCELLED = "cancelled"
    NO_STORE = "no_store"
    UNSUPPORTED = "unsupported"


class WorkRefused(Message, frozen=True, tag="work_refused"):
    """The worker will not do it and holds nothing for it."""

    request: RequestId
    attempt: int
    code: RefuseCode
    reason: str


class Cancel(Message, frozen=True, tag="cancel"):
    """Stop this attempt and all before it, and free what they hold."""

    request: RequestId
    attempt: int
    reason: str


class Owned(Message, frozen=True, tag="owned"):
    """The full list of what ``owner`` has running at the receiver.

    Gateways send it to workers, workers to the store that they hold leases at. What
    the receiver holds for this owner and misses in two lists running, it frees.
    """

    owner: NodeRef
    seq: int
    requests: tuple[RequestRef, ...]
