"""What a prefill machine is told, and what it tells its shell to do. Pure."""

from dataclasses import dataclass

from kvtide.bus.messages import (
    BlocksMade,
    BlocksMaking,
    HandoverPull,
    HandoverTaken,
    Message,
    PartSums,
    PrefillWork,
    PutBlock,
    PutSlot,
)
from kvtide.kv import Located, NodeRef, RequestRef
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
    ToPeers,
)
from kvtide.worker.steps import NO_STEP, StepShape


@dataclass(frozen=True, slots=True)
class ModelLoaded(ServedModel):
    """The engine has the model."""


@dataclass(frozen=True, slots=True)
class EngineShared:
    """Whether others want the engine too, so that steps must be short.

    ``target_ms`` is how long a step may take for their sake, what they have in it
    included: ``beside``. 0: they do not say.
    """

    shared: bool
    target_ms: float = 0.0
    beside: StepShape = NO_STEP


@dataclass(frozen=True, slots=True)
class WorkArrived:
    """Answered with a ``Reply``."""

    work: PrefillWork


@dataclass(frozen=True, slots=True)
class PullArrived:
    """Decode asks for the hand-over's state. Answered with a ``Reply``."""

    pull: HandoverPull


@dataclass(frozen=True, slots=True)
class TakenArrived:
    """Decode wants nothing more. Answered with a ``Reply``."""

    taken: HandoverTaken


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """Another prefill worker says what it computes."""

    said: BlocksMaking | BlocksMade


@dataclass(frozen=True, slots=True)
class Checked:
    """While a ``Load`` runs: the first ``blocks`` copies are what they should be.

    Their layers follow one after another, so a step over them may begin.
    """

    ref: RequestRef
    first: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Ends the ``Load`` from block ``first``: ``blocks`` of its copies are in the run.

    ``whole``: these are all of them.
    """

    ref: RequestRef
    blocks: int
    bytes: int
    ms: float
    first: int = 0
    whole: bool = True


@dataclass(frozen=True, slots=True)
class SlotsGranted:
    """Ends a ``Begin``: one answer for each block, or none at all (refused)."""

    ref: RequestRef
    slots: tuple[PutSlot, ...]


@dataclass(frozen=True, slots=True)
class PartsWritten:
    """These parts are in their slots; comes while their step runs."""

    ref: RequestRef
    parts: tuple[PartSums, ...]


@dataclass(frozen=True, slots=True)
class StepEnded:
    """Ends a ``Step``: nobody writes for its chunks any more.

    ``whole`` is what the engine computed in these ``ms``, where others shared the step.
    """

    step: int
    outcome: StepOutcome
    ms: float
    reason: str = ""
    whole: StepShape | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """Ends a ``Commit``, whatever became of the blocks; ``stored`` are new in the pool."""

    ref: RequestRef
    stored: tuple[Located, ...] = ()


Heard = (
    WorkArrived
    | CancelArrived
    | OwnedArrived
    | PullArrived
    | TakenArrived
    | PeerSaid
    | MemberGone
)
Progressed = Checked | Loaded | SlotsGranted | PartsWritten | StepEnded | Committed
Turned = (
    ModelLoaded | StoreAttached | EngineShared | Drain | Resume | GiveUp | Fenced | Tick
)
Event = Heard | Progressed | OpenFailed | Turned


@dataclass(frozen=True, slots=True)
class ToDecode:
    """Publish to the ``handover`` inbox of a decode worker."""

    decode: NodeRef
    message: Message


@dataclass(frozen=True, slots=True)
class Open:
    """Make a run for ``capacity_tokens``, or → ``OpenFailed``; ``Free`` ends it."""

    work: PrefillWork
    ref: RequestRef
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Read these copies into the run, from block ``first`` on → ``Checked``, ``Loaded``.

    Layer by layer: a step that needs a layer waits for it, and is aborted if a copy
    turns out to be bad. Where all are ``promised``, a step may wait for them before
    they are ``Checked``.
    """

    ref: RequestRef
    copies: tuple[Located, ...]
    first: int = 0
    promised: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """Ask the store for slots → ``SlotsGranted``; ``Release`` ends the lease."""

    ref: RequestRef
    blocks: tuple[PutBlock, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """Block number ``block`` is complete up to ``tokens``; it is ``put`` of the Begin."""

    block: int
    tokens: int
    put: int


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """Compute tokens ``start`` … ``end`` - 1 of the prompt.

    ``filled`` are the blocks that have a slot and are complete with this chunk: each
    layer's parts are written as they appear.
    """

    ref: RequestRef
    start: int
    end: int
    filled: tuple[Filled, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Compute these chunks → ``PartsWritten`` …, ``StepEnded``. One at a time."""

    step: int
    chunks: tuple[ChunkSpec, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the running step between two layers; it still ends with ``StepEnded``."""

    step: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the headers of blocks that are complete, commit them → ``Committed``."""

    ref: RequestRef


@dataclass(frozen=True, slots=True)
class Release:
    """Give the lease back to the store."""

    ref: RequestRef


Command = (
    Reply
    | ToDecode
    | ToGateway
    | ToPeers
    | Open
    | Load
    | Begin
    | Step
    | Abort
    | Commit
    | Release
    | Free
)
