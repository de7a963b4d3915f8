"""What a policy decides: candidates, a placement or a refusal, and the interface.

A policy is a pure function of the request and the workers: the same input gives the
same answer. It never chooses a worker that it wasn't given.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtide.kv import Located, NodeId, NodeRef
from kvtide.policy.cost import Reuse
from kvtide.policy.views import Ask, Cluster


@dataclass(frozen=True, slots=True)
class Targets:
    """What must hold for a request to be taken.

    ``queue_ms`` bounds the predicted wait (prefill's queue and decode's room) of any
    request; ``ttft_ms`` and ``tbt_ms`` apply when the request names none itself.
    """

    queue_ms: float = 120_000.0
    ttft_ms: float | None = None
    tbt_ms: float | None = None


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
    """A placement that could be made, and its cost."""

    prefill: NodeRef | None
    decode: NodeRef
    plan: Reuse
    estimate: Estimate

    @property
    def reuse(self) -> tuple[Located, ...]:
        """Copies of the first blocks of the prompt, in order."""
        return self.plan.located

    @property
    def rest_tokens(self) -> int:
        """Tokens whose KV has to be computed."""
        return self.plan.rest_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice. ``candidates`` are the best, best first, of all ``considered``."""

    chosen: Candidate
    candidates: tuple[Estimate, ...]
    considered: int
    reason: str


class RefusalCode(StrEnum):
    """Why nothing was chosen."""

    NO_WORKERS = "no_workers"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class Refusal:
    """No choice. ``retry_after_ms`` is None when trying again is pointless."""

    code: RefusalCode
    reason: str
    retry_after_ms: float | None
    candidates: tuple[Estimate, ...] = ()
    considered: int = 0


class PlacementPolicy(Protocol):
    """Chooses workers for a request."""

    def place(self, ask: Ask, cluster: Cluster) -> Placement | Refusal:
        """Choose among ``cluster``'s workers, or say why none will do."""
        ...
