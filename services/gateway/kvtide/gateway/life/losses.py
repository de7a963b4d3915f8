"""Workers that a request lost: which to leave out next, and what to say at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

from kvtide.bus.messages import (
    DecodeFailed,
    RefuseCode,
    RejectCode,
    Rejected,
    WorkRefused,
)
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


class LossKind(Enum):
    """What became of a worker's share.

    ``BUSY``: workers are full. ``AWAY``: one can't work just now, or is another one by
    now. ``FAILED``: it gave up. ``DIED``: it is dead, or as good as dead. ``UNABLE``: what
    was asked can't be done by its engine, nor by another one of that kind.
    """

    BUSY = auto()
    AWAY = auto()
    FAILED = auto()
    DIED = auto()
    UNABLE = auto()


_REFUSALS = {
    RefuseCode.DRAINING: LossKind.AWAY,
    RefuseCode.LOADING: LossKind.AWAY,
    RefuseCode.NO_STORE: LossKind.AWAY,
    RefuseCode.OTHER_LIFE: LossKind.AWAY,
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an attempt can't go on, and the answer if no other attempt is left."""

    kind: LossKind
    failure: RequestFailure
    holds_nothing: bool
    """The worker said so itself: it needs no cancel."""

    @classmethod
    def refused(cls, reply: WorkRefused) -> Self:
        """The worker refused: it holds nothing."""
        if reply.code is RefuseCode.UNSUPPORTED:
            return cls.unable(reply.reason)
        reason = f"a worker refused: {reply.reason or reply.code}"
        if reply.code in _PASSING:
            failure = RequestFailure(FailureKind.OVERLOADED, reason, DEFAULT_RETRY_MS)
        elif reply.code is RefuseCode.TOO_LARGE:
            failure = RequestFailure(FailureKind.TOO_LARGE, reason)
        else:
            failure = RequestFailure(FailureKind.WORKERS_FAILED, reason)
        kind = _REFUSALS.get(reply.code, LossKind.BUSY)
        return cls(kind, failure, holds_nothing=True)

    @classmethod
    def unable(cls, reason: str) -> Self:
        """The engine can't do what was asked, and holds nothing."""
        failure = RequestFailure(FailureKind.UNSUPPORTED, reason)
        return cls(LossKind.UNABLE, failure, holds_nothing=True)

    @classmethod
    def given_up(cls, said: DecodeFailed) -> Self:
        """The worker says that it gave up, and why."""
        if said.code == RefuseCode.UNSUPPORTED:
            return cls.unable(said.reason)
        return cls.failed(f"{said.code}: {said.reason}")

    @classmethod
    def failed(cls, reason: str) -> Self:
        """The worker gave up and holds nothing."""
        return cls(
            LossKind.FAILED,
            RequestFailure(FailureKind.WORKERS_FAILED, f"a worker failed: {reason}"),
            holds_nothing=True,
        )

    @classmethod
    def gone(cls, reason: str) -> Self:
        """That life of the worker is over, and with it what it held."""
        return cls(
            LossKind.DIED,
            RequestFailure(FailureKind.WORKERS_FAILED, f"a worker was lost: {reason}"),
            holds_nothing=True,
        )

    @classmethod
    def silent(cls, reason: str) -> Self:
        """The worker does not answer; it may hold something."""
        return cls(
            LossKind.DIED,
            RequestFailure(FailureKind.WORKERS_FAILED, f"a worker was lost: {reason}"),
            holds_nothing=False,
        )


class Exclusions:
    """Workers to leave out of the next placement, by the life that failed."""

    def __init__(self) -> None:
        """All workers are welcome."""
        self._epochs: dict[NodeId, int] = {}
        self._joined: dict[NodeId, int] = {}

    def add(self, worker: NodeRef) -> None:
        """Leave out this life of a worker and those before, if no later one is here."""
        if self._joined.get(worker.node, worker.epoch) > worker.epoch:
            return
        self._epochs[worker.node] = max(
            worker.epoch, self._epochs.get(worker.node, worker.epoch)
        )

    def joined(self, node: NodeRef) -> None:
        """A later life starts with a clean record; so does one that was only away."""
        self._joined[node.node] = node.epoch
        if self._epochs.get(node.node, node.epoch + 1) <= node.epoch:
            del self._epochs[node.node]

    def forgive(self) -> None:
        """Those who were left out are better than nobody."""
        self._epochs.clear()

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
_MAY_COME_BACK = _PASSING_REJECTIONS | {RejectCode.UNKNOWN_MODEL}


def rejection_failure(reply: Rejected) -> RequestFailure:
    """What a conductor's refusal means for the client."""
    retry_ms = None
    if reply.code in _PASSING_REJECTIONS:
        retry_ms = reply.retry_after_ms or DEFAULT_RETRY_MS
    return RequestFailure(_REJECTIONS[reply.code], reply.reason, retry_ms)


def may_come_back(reply: Rejected) -> bool:
    """Whether a request that already ran had better ask again than give up.

    A model is unknown, too, while its only workers are started again.
    """
    return reply.code in _MAY_COME_BACK
