"""What can happen to a conductor. Frozen; times come beside them, never in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, assert_never

from kvtide.bus import Changed, Gone, Joined, Member, Restarted, RosterEvent
from kvtide.bus.messages import (
    Admit,
    Beat,
    Dropped,
    ExplainQuery,
    GrantAsked,
    GrantDenied,
    Granted,
    PlacementMade,
    RequestEnded,
    TenantUse,
    UseQuery,
)
from kvtide.conductor.quota import TenantQuota
from kvtide.kv import Located, NodeId, NodeRef, TenantId

ReplyTo = NewType("ReplyTo", int)
"""Whoever asked; each question has its own and gets exactly one ``Reply`` at once."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A conductor that was asked first gave no answer. ``gone``: nobody listens there.

    Else it may still be there, until ``retry_after_ms`` from now.
    """

    conductor: NodeId
    gone: bool
    retry_after_ms: float


Word = Granted | GrantDenied | TenantUse | Unanswered
"""What another conductor said to a ``Consult``."""


@dataclass(frozen=True, slots=True)
class AdmitAsked:
    """A gateway asks for a placement. ``word`` is what another conductor said to it."""

    admit: Admit
    reply_to: ReplyTo
    word: Word | None = None


@dataclass(frozen=True, slots=True)
class GrantWanted:
    """Another conductor asks us, as the tenant's home. ``word`` as in ``AdmitAsked``."""

    asked: GrantAsked
    reply_to: ReplyTo
    word: Word | None = None


@dataclass(frozen=True, slots=True)
class UseAsked:
    """Another conductor has become a tenant's home."""

    query: UseQuery
    reply_to: ReplyTo


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Somebody asks what we know; ``members`` are the live nodes as the roster has them."""

    members: tuple[Member, ...]
    reply_to: ReplyTo


@dataclass(frozen=True, slots=True)
class ExplainAsked:
    """Somebody asks why a request was placed as it was."""

    query: ExplainQuery
    reply_to: ReplyTo


@dataclass(frozen=True, slots=True)
class PlacementHeard:
    """A conductor, perhaps this one, says that it placed a request."""

    made: PlacementMade


@dataclass(frozen=True, slots=True)
class EndHeard:
    """A gateway says that a request has had its terminal answer."""

    ended: RequestEnded


@dataclass(frozen=True, slots=True)
class BlocksMoved:
    """Copies came and went at one life of a store; drops apply before adds."""

    store: NodeRef
    added: Sequence[Located]
    dropped: Sequence[Dropped]


@dataclass(frozen=True, slots=True)
class BlocksWarmed:
    """What a catalog says that one life of a store holds: a hint until it speaks."""

    store: NodeRef
    located: Sequence[Located]


@dataclass(frozen=True, slots=True)
class StoreForgotten:
    """Nothing is known of what this store holds."""

    store: NodeId


@dataclass(frozen=True, slots=True)
class StoreExact:
    """Whether what we know of this store is complete, or being caught up with."""

    store: NodeId
    exact: bool


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A node is live and says this of itself: new, or something changed."""

    beat: Beat


@dataclass(frozen=True, slots=True)
class MemberGone:
    """This life of a node is live no more."""

    ref: NodeRef


@dataclass(frozen=True, slots=True)
class Fenced:
    """This process was paused for so long that others hold it dead: it is now ``me``."""

    me: NodeRef


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Expected about twice a second."""


@dataclass(frozen=True, slots=True)
class CostsAsked:
    """Somebody asks what workers' work costs."""

    reply_to: ReplyTo


@dataclass(frozen=True, slots=True)
class QuotasRead:
    """What the catalog says that tenants may use."""

    quotas: Mapping[TenantId, TenantQuota]


Question = AdmitAsked | GrantWanted | UseAsked | StatusAsked | ExplainAsked | CostsAsked
"""Gets one ``Reply``; of the first two, perhaps a ``Consult``, and comes again."""

BlockNews = BlocksMoved | BlocksWarmed | StoreForgotten | StoreExact
"""About what stores hold."""

News = PlacementHeard | EndHeard | MemberSeen | MemberGone | Fenced | QuotasRead | Tick
"""Everything else."""

Event = Question | BlockNews | News


def member_events(event: RosterEvent) -> tuple[Event, ...]:
    """What a change in the roster means to a conductor."""
    match event:
        case Joined(member):
            return (MemberSeen(member.beat),)
        case Changed(_, member):
            return (MemberSeen(member.beat),)
        case Restarted(before, member):
            return (MemberGone(before.ref), MemberSeen(member.beat))
        case Gone(member):
            return (MemberGone(member.ref),)
        case _:
            assert_never(event)
