"""What can happen to a request. Grouped by who says it."""

from dataclasses import dataclass
from enum import StrEnum

from kvtide.bus.messages import (
    DecodeFailed,
    Placed,
    PrefillDone,
    PrefillFailed,
    Rejected,
    TokenPage,
    Tokens,
    WorkAccepted,
    WorkRefused,
)
from kvtide.kv import NodeRef


class Stage(StrEnum):
    """Which of a placement's two workers."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Submitted:
    """The client's request is complete and valid. Comes once, first."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see ``Life.wake_s``."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody will read the answer."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The gateway must end this now (it shuts down, or it was fenced)."""

    reason: str


@dataclass(frozen=True, slots=True)
class AdmitAnswered:
    """A conductor has answered an ``Admit``."""

    reply: Placed | Rejected


@dataclass(frozen=True, slots=True)
class AdmitLost:
    """The conductor asked as number ``rank`` of ``attempt`` can't be reached.

    ``live`` is the number of conductors that are known to live.
    """

    attempt: int
    rank: int
    live: int


@dataclass(frozen=True, slots=True)
class WorkAnswered:
    """A worker takes the work or refuses it."""

    stage: Stage
    worker: NodeRef
    reply: WorkAccepted | WorkRefused


@dataclass(frozen=True, slots=True)
class WorkLost:
    """The work of ``attempt`` got no answer from ``worker``."""

    stage: Stage
    worker: NodeRef
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A worker's own message. ``sender`` is the life of the node that sent it."""

    sender: NodeRef
    message: Tokens | DecodeFailed | PrefillDone | PrefillFailed


@dataclass(frozen=True, slots=True)
class PullAnswered:
    """The reply to a ``TokenPull``."""

    worker: NodeRef
    page: TokenPage


@dataclass(frozen=True, slots=True)
class CancelAcked:
    """``worker`` holds nothing of ``attempt`` and those before any more."""

    stage: Stage
    worker: NodeRef
    attempt: int


@dataclass(frozen=True, slots=True)
class NodeGone:
    """This life of a node, and every earlier one, is dead, hung or fenced."""

    node: NodeRef


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A new life of a node is there; an earlier one's faults are not its own."""

    node: NodeRef


OutsideEvent = Submitted | Tick | ClientGone | Aborted
ConductorEvent = AdmitAnswered | AdmitLost
WorkEvent = WorkAnswered | WorkLost | CancelAcked
StreamEvent = WorkerSaid | PullAnswered
MemberEvent = NodeGone | NodeJoined
Event = OutsideEvent | ConductorEvent | WorkEvent | StreamEvent | MemberEvent
