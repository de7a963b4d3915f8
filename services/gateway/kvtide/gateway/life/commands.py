"""What a request's life wants done. The shell does it, in order."""

from dataclasses import dataclass

from kvtide.bus.messages import (
    Admit,
    Cancel,
    DecodeWork,
    FinishReason,
    PrefillWork,
    RequestEnded,
    TokenAck,
    TokenLogprobs,
    TokenPull,
)
from kvtide.gateway.life.events import Stage
from kvtide.gateway.life.spec import RequestFailure, Usage
from kvtide.kv import NodeRef


@dataclass(frozen=True, slots=True)
class SendAdmit:
    """Ask the live conductor number ``rank`` in the tenant's order (it wraps)."""

    rank: int
    message: Admit


@dataclass(frozen=True, slots=True)
class SendPrefillWork:
    """A request on the bus; its answer comes back as an event."""

    worker: NodeRef
    message: PrefillWork


@dataclass(frozen=True, slots=True)
class SendDecodeWork:
    """A request on the bus; its answer comes back as an event."""

    worker: NodeRef
    message: DecodeWork


@dataclass(frozen=True, slots=True)
class SendCancel:
    """A request on the bus; its ``Ack`` comes back as an event."""

    stage: Stage
    worker: NodeRef
    message: Cancel


@dataclass(frozen=True, slots=True)
class SendTokenAck:
    """Published, no answer."""

    worker: NodeRef
    message: TokenAck


@dataclass(frozen=True, slots=True)
class SendTokenPull:
    """A request on the bus; its ``TokenPage`` comes back as an event."""

    worker: NodeRef
    message: TokenPull


@dataclass(frozen=True, slots=True)
class Began:
    """Workers have taken the request: from now on a failure is one in mid-answer.

    At most once, before the first ``Emit``.
    """


@dataclass(frozen=True, slots=True)
class Emit:
    """The next tokens of the answer and the text that they complete.

    Text may lag behind the tokens (a split character, a possible stop string), so it
    may be empty. ``index`` counts tokens of the answer. ``logprobs`` are as many as
    ``ids`` if they were asked for, else none.
    """

    index: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The terminal answer: all is said."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Fail:
    """The terminal answer: an error."""

    failure: RequestFailure
    usage: Usage


@dataclass(frozen=True, slots=True)
class RecordEnded:
    """Tell the conductors how it ended. Exactly one in a life, also when cancelled."""

    message: RequestEnded


BusCommand = (
    SendAdmit
    | SendPrefillWork
    | SendDecodeWork
    | SendCancel
    | SendTokenAck
    | SendTokenPull
)
AnswerCommand = Began | Emit | Finish | Fail
Command = BusCommand | AnswerCommand | RecordEnded
