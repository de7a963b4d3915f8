"""What a policy decides: candidates, a placement or a refusal, and the interface.

A policy is a pure function of the request and the workers: the same input gives the
same answer. It never chooses a worker that it wasn't given.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtide.kv import Located, NodeId, NodeRef
from kvtide.policy.views import Ask, Cluster

EXPLAINED_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted cost of one pair of workers. ``prefill`` is ``decode`` if direct."""

    prefill: NodeId
    decode: NodeId
    hit_tokens: int
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    ttft_ms: float
    tbt_ms: float
    wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that can be made, and its cost.

    ``reuse`` are copies of the first blocks of the prompt, in order; ``rest_tokens`` are
    those whose KV has to be computed.
    """

    prefill: NodeRef | None
    decode: NodeRef
    reuse: tuple[Located, ...]
    rest_tokens: int
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class RestSummary:
    """The times to first token of the candidates that are not shown one by one."""

    candidates: int
    least_ttft_ms: float
    median_ttft_ms: float
    most_ttft_ms: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice. ``candidates`` are the best, best first, of all ``considered``."""

    chosen: Candidate
    candidates: tuple[Estimate, ...]
    considered: int
    reason: str
    rest: RestSummary | None = None


class RefusalCode(StrEnum):
    """Why nothing was chosen."""

    NO_WORKERS = "no_workers"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"


class Bottleneck(StrEnum):
    """What is overloaded."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Refusal:
    """No choice. ``retry_after_ms`` is None when trying again is pointless."""

    code: RefusalCode
    reason: str
    retry_after_ms: float | None
    candidates: tuple[Estimate, ...] = ()
    considered: int = 0
    rest: RestSummary | None = None
    bottleneck: Bottleneck | None = None


class PlacementPolicy(Protocol):
    """Chooses workers for a request."""

    def place(self, ask: Ask, cluster: Cluster) -> Placement | Refusal:
        """Choose among ``cluster``'s workers, or say why none will do."""
        ...
