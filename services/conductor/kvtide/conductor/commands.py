"""What a conductor wants done. The shell does it, in order."""

from dataclasses import dataclass

from kvtide.bus.messages import (
    Admit,
    Beat,
    CandidateEstimate,
    ChangeRoles,
    CostsKnown,
    DropExtras,
    Explained,
    Failure,
    GrantAsked,
    GrantDenied,
    Granted,
    Placed,
    PlacementMade,
    Rejected,
    Replicate,
    RequestEnded,
    StatusReply,
    TenantUse,
    UseQuery,
)
from kvtide.conductor.events import ReplyTo
from kvtide.kv import NodeId, Role
from kvtide.policy import RestSummary

Answer = Placed | Rejected
"""What an ``Admit`` gets."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a question."""

    reply_to: ReplyTo
    message: (
        Answer
        | Granted
        | GrantDenied
        | TenantUse
        | StatusReply
        | Explained
        | CostsKnown
        | Failure
    )


@dataclass(frozen=True, slots=True)
class Consult:
    """Ask this conductor first; its word comes with the question again."""

    conductor: NodeId
    message: GrantAsked | UseQuery


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell all conductors and stores of a placement."""

    made: PlacementMade


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Keep a decision with the estimates behind it.

    ``considered`` counts all of them, ``rest`` sums up those that aren't in ``candidates``.
    """

    admit: Admit
    answer: Answer
    candidates: tuple[CandidateEstimate, ...]
    considered: int
    rest: RestSummary | None = None


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Keep how a request ended; the prediction is there if it was made here."""

    ended: RequestEnded
    predicted: CandidateEstimate | None = None


@dataclass(frozen=True, slots=True)
class RecordNode:
    """Keep that a node is there and in which state."""

    beat: Beat


@dataclass(frozen=True, slots=True)
class RecordNodeGone:
    """Keep that a node is there no more."""

    node: NodeId
    beat: Beat


@dataclass(frozen=True, slots=True)
class TellStore:
    """Have a store make copies, or drop those that are of no use any more."""

    store: NodeId
    message: Replicate | DropExtras


@dataclass(frozen=True, slots=True)
class TellWorker:
    """Have a worker take work of other roles, told at its inbox of the role ``inbox``."""

    worker: NodeId
    inbox: Role
    message: ChangeRoles


Command = (
    Reply
    | Consult
    | Announce
    | RecordDecision
    | RecordEnd
    | RecordNode
    | RecordNodeGone
    | TellStore
    | TellWorker
)
