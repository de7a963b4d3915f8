"""Workers that a request lost: which to leave out next, and what to say at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvtide.bus.messages import RefuseCode, RejectCode, Rejected, WorkRefused
from kvtide.gateway.life.spec import FailureKind, RequestFailure
from kvtide.kv import NodeId, NodeRef

DEFAULT_RETRY_MS = 1000.0

_PASSING = frozenset(
    (
        RefuseCode.BUSY,
        RefuseCode.DRAINING,
        RefuseCode.LOADING,
        RefuseCode.NO_STORE,
        RefuseCode.OTHER_LIFE,
    )
)


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an attempt can't go on, and the answer if no other attempt is left."""

    failure: RequestFailure
    holds_nothing: bool
    """The worker said so itself: it needs no cancel."""

    @classmethod
    def refused(cls, reply: WorkRefused) -> Self:
        """The worker refused: it holds nothing."""
        reason = f"a worker refused: {reply.reason or reply.code}"
        if reply.code in _PASSING:
            failure = RequestFailure(FailureKind.OVERLOADED, reason, DEFAULT_RETRY_MS)
        elif reply.code is RefuseCode.TOO_LARGE:
            failure = RequestFailure(FailureKind.TOO_LARGE, reason)
        else:
            failure = RequestFailure(FailureKind.WORKERS_FAILED, reason)
        return cls(failure, holds_nothing=True)

    @classmethod
    def failed(cls, reason: str) -> Self:
        """The worker gave up and holds nothing."""
        return cls(
            RequestFailure(FailureKind.WORKERS_FAILED, f"a worker failed: {reason}"),
            holds_nothing=True,
        )

    @classmethod
    def silent(cls, reason: str) -> Self:
        """The worker does not answer; it may hold something."""
        return cls(
            RequestFailure(FailureKind.WORKERS_FAILED, f"a worker was lost: {reason}"),
            holds_nothing=False,
        )


class Exclusions:
    """Workers to leave out of the next placement, by the life that failed."""

    def __init__(self) -> None:
        """All workers are welcome."""
        self._epochs: dict[NodeId, int] = {}

    def add(self, worker: NodeRef) -> None:
        """Leave out this life of a worker and those before."""
        self._epochs[worker.node] = max(
            worker.epoch, self._epochs.get(worker.node, worker.epoch)
        )

    def joined(self, node: NodeRef) -> None:
        """A later life starts with a clean record."""
        if self._epochs.get(node.node, node.epoch) < node.epoch:
            del self._epochs[node.node]

    @property
    def nodes(self) -> Sequence[NodeId]:
        """Whom a conductor should not choose."""
        return tuple(self._epochs)


_REJECTIONS = {
    RejectCode.OVERLOADED: FailureKind.OVERLOADED,
    RejectCode.NO_WORKERS: FailureKind.NO_WORKERS,
    RejectCode.TENANT_LIMIT: FailureKind.TENANT_LIMIT,
    RejectCode.UNKNOWN_MODEL: FailureKind.UNKNOWN_MODEL,
    RejectCode.TOO_LARGE: FailureKind.TOO_LARGE,
    RejectCode.QUARANTINED: FailureKind.QUARANTINED,
    RejectCode.STALE_ATTEMPT: FailureKind.INTERNAL,
}
_PASSING_REJECTIONS = frozenset(
    (RejectCode.OVERLOADED, RejectCode.NO_WORKERS, RejectCode.TENANT_LIMIT)
)


def rejection_failure(reply: Rejected) -> RequestFailure:
    """What a conductor's refusal means for the client."""
    retry_ms = None
    if reply.code in _PASSING_REJECTIONS:
        retry_ms = reply.retry_after_ms or DEFAULT_RETRY_MS
    return RequestFailure(_REJECTIONS[reply.code], reply.reason, retry_ms)
