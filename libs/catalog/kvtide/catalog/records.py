"""What goes into the catalog and comes out: frozen records and changes.

Wall-clock times are seconds since the Unix epoch as the writing node saw them: for
people, never compared for decisions. A ``Change`` is idempotent: written twice, it
leaves what it leaves when written once.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvtide.kv import BlockKey, NodeId, RequestId, TenantId, Tier


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node's newest life. ``gone_at_s`` is None while it lives."""

    node: NodeId
    epoch: int
    roles: tuple[str, ...]
    host: str
    state: str
    http: str
    seen_at_s: float
    gone_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One copy of a block in one tier of one store; written by that store only.

    Tags are those of the block's header. ``header_xxh3`` is unsigned 64 bits.
    """

    node: NodeId
    key: BlockKey
    tier: Tier
    epoch: int
    key_id: int
    model_tag: bytes
    layout_tag: bytes
    tenant_tag: bytes
    tokens: int
    arena: int
    offset: int
    length: int
    generation: int
    header_xxh3: int
    stored_at_s: float
    used_at_s: float
    hits: int = 0


@dataclass(frozen=True, slots=True)
class BlockDropped:
    """The copy is gone, unless a later use of the key has taken its row.

    With a ``reason`` its row is kept as a ``RemovalRow``.
    """

    node: NodeId
    key: BlockKey
    tier: Tier
    generation: int
    reason: str = ""
    gone_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockUsed:
    """When a copy was last wanted, and how often since it was stored."""

    node: NodeId
    key: BlockKey
    tier: Tier
    generation: int
    used_at_s: float
    hits: int


@dataclass(frozen=True, slots=True)
class RemovalRow:
    """A copy that went, when, and why. Read only: made of a ``BlockDropped``.

    ``reason`` is the store's word: such as capacity, quota, extra, corrupt, removed,
    expired or demoted.
    """

    node: NodeId
    key: BlockKey
    tier: Tier
    generation: int
    reason: str
    model_tag: bytes
    tenant_tag: bytes
    tokens: int
    length: int
    stored_at_s: float
    hits: int
    gone_at_s: float


@dataclass(frozen=True, slots=True)
class BlocksForgotten:
    """All rows of the node in this tier that are of an epoch before ``epoch`` go."""

    node: NodeId
    tier: Tier
    epoch: int


class Verdict(StrEnum):
    """What a conductor answered."""

    PLACED = "placed"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """The estimate for one pair of workers, in milliseconds."""

    prefill: NodeId
    decode: NodeId
    hit_tokens: int
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class OthersRow:
    """The predicted times to first token of the candidates that a decision doesn't list."""

    candidates: int
    least_ttft_ms: float
    median_ttft_ms: float
    most_ttft_ms: float


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """What really became of a decision."""

    request: RequestId
    attempt: int
    outcome: str
    cached_tokens: int
    ttft_ms: float | None
    tbt_ms: float | None


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One answer of a conductor, and later what came of it.

    ``candidates`` are the best ones, best first; ``considered`` counts all, ``others``
    sums up those that aren't listed. Of the hit tokens ``dram_tokens`` were to be read
    from DRAM, ``ssd_tokens`` from SSD. ``outcome`` is read only: it is written as a
    ``DecisionOutcome``.
    """

    request: RequestId
    attempt: int
    conductor: NodeId
    tenant: TenantId
    model: str
    verdict: Verdict
    code: str
    reason: str
    prefill: NodeId | None
    decode: NodeId | None
    prompt_tokens: int
    hit_tokens: int
    considered: int
    candidates: tuple[CandidateRow, ...]
    decided_at_s: float
    outcome: DecisionOutcome | None = None
    dram_tokens: int = 0
    ssd_tokens: int = 0
    others: OthersRow | None = None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request that has ended."""

    request: RequestId
    attempt: int
    gateway: NodeId
    tenant: TenantId
    model: str
    outcome: str
    code: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tbt_ms: float | None
    total_ms: float
    ended_at_s: float


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A tenant. A deleted one stays as a row, so that late nodes learn of it.

    Tenants with the same ``share`` keep their blocks in one cache; "": each its own.
    """

    tenant: TenantId
    name: str
    created_at_s: float
    deleted_at_s: float | None = None
    share: str = ""


@dataclass(frozen=True, slots=True)
class DeletionRow:
    """Blocks of a tenant, a model, or both that are removed, by tags; empty: any.

    What was stored after ``until_s`` is not meant. A store that was down reads these
    when it starts.
    """

    tenant_tag: bytes
    model_tag: bytes
    until_s: float


@dataclass(frozen=True, slots=True)
class RemovedBlockRow:
    """A single block that is removed: see ``DeletionRow``."""

    key: BlockKey
    until_s: float


@dataclass(frozen=True, slots=True)
class TenantKeyRow:
    """What a tenant's blocks are encrypted with on SSDs, itself encrypted.

    ``wrapped`` is empty once it is destroyed; the row stays, so that none is made anew.
    ``kek_id`` names the key that it is wrapped with, which is never here.
    """

    tenant_tag: bytes
    key_id: bytes
    kek_id: str
    wrapped: bytes
    made_at_s: float
    destroyed_at_s: float | None = None


class KeyScope(StrEnum):
    """What a key opens: a tenant's own requests, or administration and nothing else."""

    CLIENT = "client"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class ApiKeyRow:
    """An API key: its public ``prefix``, by which it is found, and its SHA-256."""

    key_hash: bytes
    tenant: TenantId
    label: str
    created_at_s: float
    expires_at_s: float | None = None
    revoked_at_s: float | None = None
    prefix: str = ""
    scope: KeyScope = KeyScope.CLIENT


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """A tenant's limits; None is no limit."""

    tenant: TenantId
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent_requests: int | None = None
    pool_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What was done or tried: by whom, to what, and whether it was.

    ``entry`` is a random name, so that a row that is written twice is there once.
    """

    entry: str
    at_s: float
    actor: str
    action: str
    target: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask, at one moment. Read only.

    ``revision`` grows with each change; ``keys_made`` is 0 until the first key ever.
    """

    revision: int = 0
    keys_made: int = 0
    tenants: tuple[TenantRow, ...] = ()
    keys: tuple[ApiKeyRow, ...] = ()
    quotas: tuple[QuotaRow, ...] = ()


Change = (
    NodeRow
    | BlockRow
    | BlockDropped
    | BlockUsed
    | BlocksForgotten
    | DecisionRow
    | DecisionOutcome
    | RequestRow
    | TenantRow
    | DeletionRow
    | RemovedBlockRow
    | TenantKeyRow
    | ApiKeyRow
    | QuotaRow
    | AuditRow
)
"""Everything that can be written."""
