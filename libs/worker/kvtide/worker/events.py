"""What the machines of all workers are told, and what all of them tell. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from kvtide.bus.messages import Cancel, Message, Owned
from kvtide.kv import NodeId, NodeRef, RequestRef


@dataclass(frozen=True, slots=True)
class StoreAttached:
    """The store on this host, ``node``, can (or can no longer) be written to."""

    attached: bool
    node: NodeId | None = None


@dataclass(frozen=True, slots=True)
class CancelArrived:
    """Answered with a ``Reply``."""

    cancel: Cancel


@dataclass(frozen=True, slots=True)
class OwnedArrived:
    """A gateway's list of what it has here."""

    owned: Owned


@dataclass(frozen=True, slots=True)
class MemberGone:
    """This life of a node has ended."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """An ``Open`` made no run; what is asked of it fails. ``Free`` ends it all the same."""

    ref: RequestRef
    reason: str


class StepOutcome(StrEnum):
    """How an engine step ended."""

    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Take new work again."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail all that has not ended."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """This process was thought dead and is a new life now: drop all, silently."""

    me: NodeRef


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


OwnerSaid = CancelArrived | OwnedArrived | MemberGone
"""What may end the lease of requests."""

Turned = StoreAttached | Drain | Resume | GiveUp | Fenced | Tick
"""What is of the worker as a whole."""

CommonEvent = OwnerSaid | OpenFailed | Turned


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the event that is being handled."""

    message: Message


@dataclass(frozen=True, slots=True)
class ToGateway:
    """Publish to the ``tokens`` inbox of a gateway."""

    gateway: NodeRef
    message: Message


@dataclass(frozen=True, slots=True)
class ToPeers:
    """Publish to all workers of this role."""

    message: Message


@dataclass(frozen=True, slots=True)
class Free:
    """Close the run."""

    ref: RequestRef
