"""What the serving machine is told, and what it commands. Pure."""

from dataclasses import dataclass

from kvtide.bus.messages import DecodeWork, TokenAck, TokenPull
from kvtide.kv import RequestRef
from kvtide.router.answer import Delta
from kvtide.worker.events import Reply, ToGateway


@dataclass(frozen=True, slots=True)
class WorkArrived:
    """A gateway wants an answer."""

    work: DecodeWork


@dataclass(frozen=True, slots=True)
class AckArrived:
    """A gateway has tokens."""

    ack: TokenAck


@dataclass(frozen=True, slots=True)
class PullArrived:
    """A gateway misses tokens."""

    pull: TokenPull


@dataclass(frozen=True, slots=True)
class Said:
    """The engine has drawn tokens."""

    ref: RequestRef
    delta: Delta


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine's stream has ended as it should; ``cached_tokens`` if it told."""

    ref: RequestRef
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine failed, refused, or is gone."""

    ref: RequestRef
    code: str
    reason: str


Event = WorkArrived | AckArrived | PullArrived | Said | Ended | Broken


@dataclass(frozen=True, slots=True)
class Ask:
    """Send it to the engine, and report what it says."""

    work: DecodeWork


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the stream: nobody wants the rest."""

    ref: RequestRef


Command = Reply | ToGateway | Ask | HangUp
