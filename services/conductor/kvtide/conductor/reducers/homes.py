"""Whether a tenant's limits let a request be placed, and who has to be asked for that.

A tenant's home is the first live conductor in its rendezvous order. It grants from its
own account of the tenant; a conductor that isn't the home asks it. A conductor that
becomes the home asks the next one in the order, once in its life for each tenant, what
was used so far. If that one was not the home in its own life, the one that has lived
longest is asked too: it has heard of the most placements. So what was used is known as
long as any conductor lives on that was there. One that is asked for what was used asks
nobody, so no question goes round in a circle.

A home that nobody answers for is dead (nobody listens at its address: then whoever was
asked grants by what it heard of all placements), or it may still grant: then nothing
is granted in its place until it is known as gone.
"""

from kvtide.bus.messages import (
    GrantAsked,
    GrantDenied,
    Granted,
    TenantUse,
    UseQuery,
)
from kvtide.conductor.commands import Consult
from kvtide.conductor.events import Unanswered, Word
from kvtide.conductor.reducers.limits import Denied, TenantLimits
from kvtide.conductor.reducers.membership import Membership
from kvtide.kv import NodeId, NodeRef, Role, TenantId, rendezvous_order

LEASE_S = 5.0
"""For how long a grant waits for its placement to be heard."""


class Homes:
    """Decides over ``TenantLimits`` with the word of others."""

    def __init__(self, members: Membership, limits: TenantLimits) -> None:
        """``members`` are read only."""
        self._members = members
        self._limits = limits

    def place(
        self, me: NodeRef, ask: GrantAsked, word: Word | None, now_s: float
    ) -> Consult | Denied | None:
        """Before a request is placed here: None is granted. Idempotent by request."""
        limits = self._limits
        if limits.holds(ask.request) or not limits.is_limited(ask.tenant):
            return limits.grant(ask.tenant, ask.request, ask.tokens, now_s)
        order = self._order(ask.tenant, me)
        home = order[0].node
        if home != me.node:
            # beside a dead one we are not the home yet: that asks what was used
            if not _is_dead(home, word):
                return self._of_home(home, ask, word, now_s)
        elif (went := self._adopt(ask.tenant, order, me, word, now_s)) is not None:
            return went
        return limits.grant(ask.tenant, ask.request, ask.tokens, now_s)

    def lend(
        self, me: NodeRef, ask: GrantAsked, word: Word | None, now_s: float
    ) -> Consult | Denied | None:
        """Another conductor takes us for the tenant's home: None is granted."""
        limits = self._limits
        if not limits.holds(ask.request) and limits.is_limited(ask.tenant):
            order = self._order(ask.tenant, me)
            elsewhere = self._adopt(ask.tenant, order, me, word, now_s)
            if elsewhere is not None:
                return elsewhere
        until_s = now_s + LEASE_S
        return limits.lend(ask.tenant, ask.request, ask.tokens, until_s, now_s)

    def _of_home(
        self, home: NodeId, ask: GrantAsked, word: Word | None, now_s: float
    ) -> Consult | Denied | None:
        """What another conductor, the tenant's home, says to a placement here."""
        match word:
            case Granted():
                self._limits.heard(ask.tenant, ask.request, ask.tokens, now_s)
                return None
            case GrantDenied(reason=reason, retry_after_ms=retry_after_ms):
                return Denied(reason, retry_after_ms)
            case Unanswered(conductor=silent) if silent == home:
                return _silent(ask.tenant, word)
            case _:
                return Consult(home, ask)

    def _adopt(
        self,
        tenant: TenantId,
        order: list[NodeRef],
        me: NodeRef,
        word: Word | None,
        now_s: float,
    ) -> Consult | None:
        """Whom to ask what was used; None once that is known, or nobody knows more."""
        limits = self._limits
        if limits.is_adopted(tenant):
            return None
        others = [each for each in order if each.node != me.node]
        ask = others[0].node if others else None
        if isinstance(word, TenantUse) and word.tenant == tenant:
            limits.learn(tenant, word, now_s)
            oldest = self._oldest(others)
            later = word.whole or word.conductor != ask or oldest == ask
            ask = None if later else oldest
        if ask is not None and not isinstance(word, Unanswered):
            return Consult(ask, UseQuery(tenant=tenant))
        limits.adopt(tenant, now_s)
        return None

    def _oldest(self, others: list[NodeRef]) -> NodeId | None:
        """Who has sent most beats in its life; all send them equally often."""
        beats = [self._members.get(each.node) for each in others]
        oldest = max(
            (beat for beat in beats if beat is not None),
            key=lambda beat: beat.seq,
            default=None,
        )
        return oldest.node.node if oldest is not None else None

    def _order(self, tenant: TenantId, me: NodeRef) -> list[NodeRef]:
        live = {
            beat.node.node: beat.node for beat in self._members.live(Role.CONDUCTOR)
        }
        return rendezvous_order(tenant, (live | {me.node: me}).values())


def _is_dead(home: NodeId, word: Word | None) -> bool:
    """Whether nobody listens at the home's address."""
    return isinstance(word, Unanswered) and word.gone and word.conductor == home


def _silent(tenant: TenantId, word: Unanswered) -> Denied:
    reason = f"{word.conductor}, which keeps the limits of {tenant}, does not answer"
    return Denied(reason, word.retry_after_ms)
