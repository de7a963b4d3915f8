"""What a decode machine is told, and what it tells its shell to do. Pure."""

from dataclasses import dataclass

from kvtide.bus.messages import (
    DecodeWork,
    HandoverPlan,
    HandoverState,
    PartsReady,
    PartSums,
    PrefillDone,
    PrefillFailed,
    SamplingSpec,
    TokenAck,
    TokenLogprobs,
    TokenPull,
)
from kvtide.kv import BlockKey, Located, NodeRef, RequestRef, SlotRef
from kvtide.worker.custody import ServedModel
from kvtide.worker.events import (
    CancelArrived,
    Drain,
    Fenced,
    Free,
    GiveUp,
    MemberGone,
    OpenFailed,
    OwnedArrived,
    Reply,
    Resume,
    StepOutcome,
    StoreAttached,
    Tick,
    ToGateway,
)
from kvtide.worker.steps import StepShape


@dataclass(frozen=True, slots=True)
class ModelLoaded(ServedModel):
    """The engine has the model. ``layers`` counts; memory is for ``capacity_tokens``."""

    layers: int
    eos_token_ids: tuple[int, ...]
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class WorkArrived:
    """Answered with a ``Reply``."""

    work: DecodeWork


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
class BlockCopy:
    """Block number ``block`` as it is in the pool."""

    block: int
    located: Located


@dataclass(frozen=True, slots=True)
class CopiesRead:
    """Ends a ``ReadCopies``: these blocks are whole and verified, those are not."""

    ref: RequestRef
    read: tuple[int, ...]
    missed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopiesFound:
    """Ends a ``FindCopies``: those that are there, by block."""

    ref: RequestRef
    copies: tuple[BlockCopy, ...]


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


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that was drawn for a row, and its log-probabilities if wanted."""

    ref: RequestRef
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A row whose output can't be used, in a step that is done for the others."""

    ref: RequestRef
    reason: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """Ends a ``Step``; nobody touches its runs any more.

    ``whole`` is what the engine computed in these ``ms``, where others shared the step.
    """

    step: int
    outcome: StepOutcome
    ms: float
    sampled: tuple[Sampled, ...] = ()
    reason: str = ""
    failed: tuple[RowFailed, ...] = ()
    whole: StepShape | None = None


@dataclass(frozen=True, slots=True)
class BlocksPut:
    """Ends a ``PutBlocks``, whatever became of them."""

    ref: RequestRef


Heard = (
    WorkArrived
    | CancelArrived
    | OwnedArrived
    | MemberGone
    | AckArrived
    | PullArrived
    | HandoverSaid
)
Operated = HandoverAnswered | CopiesFound | CopiesRead | PartsRead | BlocksPut
Progressed = Operated | TakenAnswered | StepEnded
Turned = ModelLoaded | StoreAttached | Drain | Resume | GiveUp | Fenced | Tick
Event = Heard | Progressed | OpenFailed | Turned


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
class KeyedBlock:
    """A full block of the sequence, by number, with the key of it and all before."""

    block: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class FindCopies:
    """Look which of these blocks the store on this host has → ``CopiesFound``."""

    ref: RequestRef
    blocks: tuple[KeyedBlock, ...]


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
class Context:
    """The client's prompt, and all that was generated after it, in earlier attempts too."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Feed ``tokens`` at positions ``start``, ….

    With ``sampling`` draw the token that follows; ``banned`` ids can't be drawn.
    ``context`` is there where the draw depends on it.
    """

    ref: RequestRef
    start: int
    tokens: tuple[int, ...]
    sampling: SamplingSpec | None
    banned: tuple[int, ...] = ()
    context: Context | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Compute these rows → ``StepEnded``. One at a time."""

    step: int
    rows: tuple[Row, ...]

    @property
    def shape(self) -> StepShape:
        """What it computes."""
        spans = [(row.start, row.start + len(row.tokens)) for row in self.rows]
        return StepShape.of(spans)


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """Offer computed blocks to the pool → ``BlocksPut``. Nothing waits for it."""

    ref: RequestRef
    put: int
    blocks: tuple[KeyedBlock, ...]


Command = (
    Reply
    | ToGateway
    | AskHandover
    | TellTaken
    | Open
    | FindCopies
    | ReadCopies
    | ReadParts
    | Step
    | PutBlocks
    | Free
)
