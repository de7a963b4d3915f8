"""All messages, one file per hop, in the order of a request's life."""

from kvtide.bus.messages.admission import (
    Admit,
    CandidateEstimate,
    Outcome,
    Placed,
    RejectCode,
    Rejected,
    RequestEnded,
)
from kvtide.bus.messages.base import (
    Ack,
    Failure,
    Message,
)
from kvtide.bus.messages.curation import (
    BlockListing,
    BlockPage,
    BlocksDone,
    BlockSelector,
    ListBlocks,
    PinBlocks,
    RemoveBlocks,
    UnpinBlocks,
)
from kvtide.bus.messages.gossip import (
    BlocksChanged,
    Dropped,
    PlacementMade,
    SnapshotPage,
    SnapshotPull,
)
from kvtide.bus.messages.handover import (
    MOST_CHUNK_TIMES,
    ChunkTime,
    HandoverCopy,
    HandoverPlan,
    HandoverPull,
    HandoverSlot,
    HandoverState,
    HandoverTaken,
    PartsReady,
    PartSums,
    PrefillDone,
    PrefillFailed,
    PrefillTimes,
)
from kvtide.bus.messages.making import MOST_MAKING, BlocksMade, BlocksMaking
from kvtide.bus.messages.membership import (
    ArenaGrant,
    ArenaRequest,
    Beat,
    Bound,
    ChangeRoles,
    ConductorLoad,
    DecodeLoad,
    GatewayLoad,
    Goodbye,
    Load,
    LoadSample,
    NodeState,
    PrefillLoad,
    StepSample,
    StoreLoad,
)
from kvtide.bus.messages.pool import (
    BadCopy,
    BlocksStaged,
    BlockState,
    CommitBlock,
    LeaseRelease,
    Presence,
    PresenceReply,
    PutBegin,
    PutBlock,
    PutCommit,
    PutCommitted,
    PutGranted,
    PutSlot,
    StageBlocks,
)
from kvtide.bus.messages.quotas import (
    GrantAsked,
    GrantDenied,
    Granted,
    HeldGrant,
    TenantUse,
    UseQuery,
)
from kvtide.bus.messages.replication import (
    DrainBegin,
    DrainCancel,
    DrainPhase,
    DrainQuery,
    DrainState,
    DropExtras,
    ReplicaReason,
    ReplicaReply,
    Replicate,
)
from kvtide.bus.messages.sampling import (
    GrammarLanguage,
    GrammarSpec,
    SamplingSpec,
    TokenLogprobs,
)
from kvtide.bus.messages.status import (
    ActualTimes,
    CostsKnown,
    CostsQuery,
    Explained,
    ExplainQuery,
    NodeView,
    OtherCandidates,
    StatusQuery,
    StatusReply,
)
from kvtide.bus.messages.tokens import (
    DecodeFailed,
    DecodeTimes,
    FinishReason,
    PullState,
    TokenAck,
    TokenPage,
    TokenPull,
    Tokens,
)
from kvtide.bus.messages.work import (
    Cancel,
    DecodeWork,
    Owned,
    PictureWork,
    PrefillWork,
    RefuseCode,
    WorkAccepted,
    WorkRefused,
)

AnyMessage = (
    Ack
    | Failure
    | Admit
    | CandidateEstimate
    | Placed
    | Rejected
    | RequestEnded
    | GrantAsked
    | Granted
    | GrantDenied
    | UseQuery
    | TenantUse
    | PrefillWork
    | DecodeWork
    | PictureWork
    | WorkAccepted
    | WorkRefused
    | Cancel
    | Owned
    | HandoverPlan
    | PartsReady
    | PrefillDone
    | PrefillFailed
    | HandoverPull
    | HandoverState
    | HandoverTaken
    | BlocksMaking
    | BlocksMade
    | Tokens
    | TokenAck
    | TokenPull
    | TokenPage
    | DecodeFailed
    | PutBegin
    | PutGranted
    | PutCommit
    | PutCommitted
    | LeaseRelease
    | Presence
    | PresenceReply
    | BadCopy
    | StageBlocks
    | BlocksStaged
    | BlocksChanged
    | SnapshotPull
    | SnapshotPage
    | PlacementMade
    | Replicate
    | ReplicaReply
    | DropExtras
    | ListBlocks
    | BlockPage
    | PinBlocks
    | UnpinBlocks
    | RemoveBlocks
    | BlocksDone
    | DrainBegin
    | DrainCancel
    | DrainQuery
    | DrainState
    | Beat
    | Goodbye
    | ChangeRoles
    | ArenaGrant
    | ArenaRequest
    | StatusQuery
    | StatusReply
    | ExplainQuery
    | Explained
    | CostsQuery
    | CostsKnown
)
"""The closed union of everything that may be on the bus."""

__all__ = [
    "MOST_CHUNK_TIMES",
    "MOST_MAKING",
    "Ack",
    "ActualTimes",
    "Admit",
    "AnyMessage",
    "ArenaGrant",
    "ArenaRequest",
    "BadCopy",
    "Beat",
    "BlockListing",
    "BlockPage",
    "BlockSelector",
    "BlockState",
    "BlocksChanged",
    "BlocksDone",
    "BlocksMade",
    "BlocksMaking",
    "BlocksStaged",
    "Bound",
    "Cancel",
    "CandidateEstimate",
    "ChangeRoles",
    "ChunkTime",
    "CommitBlock",
    "ConductorLoad",
    "CostsKnown",
    "CostsQuery",
    "DecodeFailed",
    "DecodeLoad",
    "DecodeTimes",
    "DecodeWork",
    "DrainBegin",
    "DrainCancel",
    "DrainPhase",
    "DrainQuery",
    "DrainState",
    "DropExtras",
    "Dropped",
    "ExplainQuery",
    "Explained",
    "Failure",
    "FinishReason",
    "GatewayLoad",
    "Goodbye",
    "GrammarLanguage",
    "GrammarSpec",
    "GrantAsked",
    "GrantDenied",
    "Granted",
    "HandoverCopy",
    "HandoverPlan",
    "HandoverPull",
    "HandoverSlot",
    "HandoverState",
    "HandoverTaken",
    "HeldGrant",
    "LeaseRelease",
    "ListBlocks",
    "Load",
    "LoadSample",
    "Message",
    "NodeState",
    "NodeView",
    "OtherCandidates",
    "Outcome",
    "Owned",
    "PartSums",
    "PartsReady",
    "PictureWork",
    "PinBlocks",
    "Placed",
    "PlacementMade",
    "PrefillDone",
    "PrefillFailed",
    "PrefillLoad",
    "PrefillTimes",
    "PrefillWork",
    "Presence",
    "PresenceReply",
    "PullState",
    "PutBegin",
    "PutBlock",
    "PutCommit",
    "PutCommitted",
    "PutGranted",
    "PutSlot",
    "RefuseCode",
    "RejectCode",
    "Rejected",
    "RemoveBlocks",
    "ReplicaReason",
    "ReplicaReply",
    "Replicate",
    "RequestEnded",
    "SamplingSpec",
    "SnapshotPage",
    "SnapshotPull",
    "StageBlocks",
    "StatusQuery",
    "StatusReply",
    "StepSample",
    "StoreLoad",
    "TenantUse",
    "TokenAck",
    "TokenLogprobs",
    "TokenPage",
    "TokenPull",
    "Tokens",
    "UnpinBlocks",
    "UseQuery",
    "WorkAccepted",
    "WorkRefused",
]
