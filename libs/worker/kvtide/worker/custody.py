"""Whose requests a worker holds, and why it takes no more. Pure."""

from dataclasses import dataclass, field, replace

from kvtide.bus.messages import (
    DecodeWork,
    PictureWork,
    PrefillWork,
    PullState,
    RefuseCode,
    TokenPage,
    TokenPull,
    WorkRefused,
)
from kvtide.bus.ownership import Ownership, Standing
from kvtide.kv import NodeRef, RequestRef
from kvtide.worker.events import (
    CancelArrived,
    Drain,
    MemberGone,
    OwnedArrived,
    OwnerSaid,
    Resume,
    StoreAttached,
)

Work = PrefillWork | DecodeWork
Refusal = tuple[RefuseCode, str]
"""Why work is not taken: for machines, and for people."""

TOO_LATE: dict[Standing, Refusal] = {
    Standing.STALE: (RefuseCode.STALE_ATTEMPT, "a newer attempt is known, or it ended"),
    Standing.CANCELLED: (RefuseCode.CANCELLED, "this attempt was cancelled"),
    Standing.FENCED: (RefuseCode.STALE_ATTEMPT, "a newer life of the gateway is known"),
}
"""The refusals of work that comes too late."""

BLIND: Refusal = (
    RefuseCode.UNSUPPORTED,
    "this model's engine takes no pictures: send text alone",
)
"""The refusal of pictures where none are seen."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What work must fit. Sizes are in tokens. ``adapted``: also served, on the same model.

    ``pictures``: the engine sees them. One that does not must never get a prompt that
    has some, for it would answer without them.
    """

    model: str
    max_tokens: int
    block_tokens: int
    adapted: frozenset[str] = field(default=frozenset[str](), kw_only=True)
    pictures: bool = field(default=False, kw_only=True)

    def unfit(self, work: Work) -> "Refusal | None":
        """Why this model can't do it."""
        if isinstance(work, PictureWork):
            return None if self.pictures else BLIND
        if len(work.keys) < (len(work.tokens) - 1) // self.block_tokens:
            return RefuseCode.TOO_LARGE, "a key for each full block is missing"
        return None


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a worker has to work with."""

    model: ServedModel | None = None
    attached: bool = False
    draining: bool = False

    def turned(self, event: StoreAttached | Drain | Resume) -> "Readiness":
        """As it is after this."""
        match event:
            case StoreAttached(attached):
                return replace(self, attached=attached)
            case Drain() | Resume():
                return replace(self, draining=isinstance(event, Drain))

    def unfit(self, work: Work, me: NodeRef) -> Refusal | None:
        """Why this work can't be done here at all, a store apart."""
        if work.worker not in (None, me):
            return RefuseCode.OTHER_LIFE, "it was meant for another life of this worker"
        if self.draining:
            return RefuseCode.DRAINING, "the worker is ending"
        model = self.model
        if model is None:
            return RefuseCode.LOADING, "the model is still loading"
        if work.model != model.model and work.model not in model.adapted:
            return RefuseCode.UNKNOWN_MODEL, f"this worker serves {model.model}"
        return model.unfit(work)


def released(owners: Ownership, event: OwnerSaid, now_s: float) -> list[RequestRef]:
    """The requests that are to be freed for what was said."""
    match event:
        case CancelArrived(cancel):
            ref = RequestRef(cancel.request, cancel.attempt)
            held = owners.cancel(ref, now_s)
            return [] if held is None else [held]
        case OwnedArrived(owned):
            return owners.listed(owned.owner, owned.seq, owned.requests, now_s)
        case MemberGone(node):
            return owners.gone(node)


def refused(ref: RequestRef, refusal: Refusal) -> WorkRefused:
    """The answer to work that is not taken."""
    code, reason = refusal
    return WorkRefused(
        request=ref.request, attempt=ref.attempt, code=code, reason=reason
    )


def unknown_page(pull: TokenPull) -> TokenPage:
    """The answer to a pull for a request that is not here."""
    return TokenPage(
        request=pull.request,
        attempt=pull.attempt,
        choice=pull.choice,
        index=pull.index,
        ids=(),
        state=PullState.UNKNOWN,
    )
