"""What a decode machine is told, and what it tells its shell to do. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from kvtide.bus.messages import (
    Cancel,
    DecodeWork,
    HandoverPlan,
    HandoverState,
    Message,
    Owned,
    PartsReady,
    PartSums,
    PrefillDone,
    PrefillFailed,
    SamplingSpec,
    TokenAck,
    TokenPull,
)
from kvtide.kv import BlockKey, Located, NodeRef, RequestRef, SlotRef


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """The engine has the model. Sizes are in tokens; ``layers`` counts."""

    model: str
    max_tokens: int
    block_tokens: int
    layers: int
    eos_token_ids: tuple[int, ...]
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class StoreAttached:
    """The store on this host can (or can no longer) be written to."""

    attached: bool


@dataclass(frozen=True, slots=True)
class WorkArrived:
    """Answered with a ``Reply``."""

    work: DecodeWork


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
class AckArrived:
    """A gateway has tokens."""

    ack: TokenAck


@dataclass(frozen=True, slots=True)
class PullArrived:
    """A gateway misses tokens. Answered with a ``Reply``."""

    pull: TokenPull


@dataclass(frozen=True, slots=True)
class HandoverSaid:
    """Prefill says something by itself."""

    message: HandoverPlan | PartsReady | PrefillDone | PrefillFailed


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """An ``Open`` made no run; what is asked of it fails. ``Free`` ends it all the same."""

    ref: RequestRef
    reason: str


@dataclass(frozen=True, slots=True)
class HandoverAnswered:
    """Ends an ``AskHandover``; None: no answer, or prefill does not know the request."""

    ref: RequestRef
    state: HandoverState | None


@dataclass(frozen=True, slots=True)
class TakenAnswered:
    """Ends a ``TellTaken``."""

    ref: RequestRef
    acked: bool


@dataclass(frozen=True, slots=True)
class CopiesRead:
    """Ends a ``ReadCopies``: these blocks are whole and verified, those are not."""

    ref: RequestRef
    read: tuple[int, ...]
    missed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """K and V of one layer of one block."""

    block: int
    layer: int


@dataclass(frozen=True, slots=True)
class PartsRead:
    """Ends a ``ReadParts``: these are there and verified, those are not."""

    ref: RequestRef
    read: tuple[LayerPart, ...]
    missed: tuple[LayerPart, ...]


class StepOutcome(StrEnum):
    """How an engine step ended."""

    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that was drawn for a row."""

    ref: RequestRef
    token: int


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A row whose output can't be used, in a step that is done for the others."""

    ref: RequestRef
    reason: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """Ends a ``Step``; nobody touches its runs any more."""

    step: int
    outcome: StepOutcome
    ms: float
    sampled: tuple[Sampled, ...] = ()
    reason: str = ""
    failed: tuple[RowFailed, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksPut:
    """Ends a ``PutBlocks``, whatever became of them."""

    ref: RequestRef


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail all that is not finished."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """This process was thought dead and is a new life now: drop all, silently."""

    me: NodeRef


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Heard = (
    WorkArrived
    | CancelArrived
    | OwnedArrived
    | MemberGone
    | AckArrived
    | PullArrived
    | HandoverSaid
)
Progressed = (
    HandoverAnswered | TakenAnswered | CopiesRead | PartsRead | StepEnded | BlocksPut
)
Turned = ModelLoaded | StoreAttached | Drain | GiveUp | Fenced | Tick
Event = Heard | Progressed | OpenFailed | Turned


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
class AskHandover:
    """Pull the hand-over's state from prefill → ``HandoverAnswered``."""

    ref: RequestRef
    prefill: NodeRef


@dataclass(frozen=True, slots=True)
class TellTaken:
    """Tell prefill to let go → ``TakenAnswered``."""

    ref: RequestRef
    prefill: NodeRef


@dataclass(frozen=True, slots=True)
class Open:
    """Make a run for ``capacity_tokens``, or → ``OpenFailed``; ``Free`` ends it."""

    work: DecodeWork
    ref: RequestRef
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block number ``block`` as it is in the pool."""

    block: int
    located: Located


@dataclass(frozen=True, slots=True)
class ReadCopies:
    """Read whole blocks from the pool into the run → ``CopiesRead``."""

    ref: RequestRef
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A layer's K and V of ``tokens`` tokens of a block that is being handed over."""

    slot: SlotRef
    tokens: int
    sums: PartSums


@dataclass(frozen=True, slots=True)
class ReadParts:
    """Read parts from prefill's slots into the run → ``PartsRead``."""

    ref: RequestRef
    parts: tuple[PartCopy, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Feed ``tokens`` at positions ``start``, ….

    With ``sampling`` draw the token that follows; ``banned`` ids can't be drawn.
    """

    ref: RequestRef
    start: int
    tokens: tuple[int, ...]
    sampling: SamplingSpec | None
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Compute these rows → ``StepEnded``. One at a time."""

    step: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class KeyedBlock:
    """A full block of the sequence, by number, with the key of it and all before."""

    block: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """Offer computed blocks to the pool → ``BlocksPut``. Nothing waits for it."""

    ref: RequestRef
    put: int
    blocks: tuple[KeyedBlock, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Close the run."""

    ref: RequestRef


Command = (
    Reply
    | ToGateway
    | AskHandover
    | TellTaken
    | Open
    | ReadCopies
    | ReadParts
    | Step
    | PutBlocks
    | Free
)
