"""Routes events to the reducers and their answers to commands. Decides nothing itself.

Pure: no clock, socket or ``await``. A shell or a simulator calls ``handle`` with each
event and the time, and does the commands in order. Each question gets exactly one
``Reply``, among the commands of its own event; or one ``Consult`` alone, after which the
question comes again with the word of the conductor that was asked.
"""

from typing import assert_never

from kvtide.bus.messages import (
    Beat,
    ConductorLoad,
    GatewayLoad,
    GrantDenied,
    Granted,
    NodeView,
    Outcome,
    Placed,
    PlacementMade,
    RequestEnded,
    StatusReply,
)
from kvtide.conductor.commands import (
    Announce,
    Command,
    Consult,
    RecordEnd,
    RecordNode,
    RecordNodeGone,
    Reply,
    TellStore,
)
from kvtide.conductor.events import (
    AdmitAsked,
    BlockNews,
    BlocksMoved,
    BlocksWarmed,
    CostsAsked,
    EndHeard,
    Event,
    ExplainAsked,
    Fenced,
    GrantWanted,
    MemberGone,
    MemberSeen,
    News,
    PlacementHeard,
    Question,
    QuotasRead,
    StatusAsked,
    StoreExact,
    StoreForgotten,
    Tick,
    UseAsked,
)
from kvtide.conductor.limits import ConductorLimits
from kvtide.conductor.reducers.admission import (
    Admission,
    Decision,
    Knowledge,
    booking_of,
)
from kvtide.conductor.reducers.answers import Answers
from kvtide.conductor.reducers.bookings import Bookings
from kvtide.conductor.reducers.calibration import Calibration
from kvtide.conductor.reducers.costs import Costs, class_of
from kvtide.conductor.reducers.explanations import Explanations
from kvtide.conductor.reducers.fleet import FleetTable
from kvtide.conductor.reducers.homes import Homes
from kvtide.conductor.reducers.limits import Denied, TenantLimits
from kvtide.conductor.reducers.membership import Membership
from kvtide.conductor.reducers.outlook import Outlook
from kvtide.conductor.reducers.pending import PendingBlocks
from kvtide.conductor.reducers.prefix_index import PrefixIndex
from kvtide.conductor.reducers.replication import Replication, ReplicationRules
from kvtide.conductor.reducers.roles import RoleAdvice, Roles
from kvtide.conductor.reducers.sight import Sight
from kvtide.conductor.serving import ServingRules
from kvtide.kv import NodeRef, Role
from kvtide.policy import ColumnPolicy, PolicyName, rules_of

_S_TO_MS = 1000.0


class Dispatcher:
    """One conductor's mind. ``me`` is the life of the process that it thinks for."""

    def __init__(
        self,
        me: NodeRef,
        *,
        policy: ColumnPolicy | None = None,
        limits: ConductorLimits | None = None,
        replication: ReplicationRules | None = None,
        serving: ServingRules | None = None,
    ) -> None:
        """Start knowing nothing; everything comes as events."""
        self.me = me
        policy = policy or ColumnPolicy(rules_of(PolicyName.BEST))
        serving = serving or ServingRules()
        self._limits = limits or ConductorLimits()
        self._members = Membership()
        self._index = PrefixIndex()
        self._bookings = Bookings(self._limits)
        self._costs = Costs(policy.seeds, serving.profiles)
        self._fleet = FleetTable(self._bookings, self._costs)
        self._outlook = Outlook(
            self._members,
            self._fleet,
            serving.prediction,
            answer_tokens=policy.seeds.answer_tokens,
            tbt_ms=policy.seeds.step_ms,
        )
        self._quotas = serving.quotas
        self._tenants = TenantLimits(serving.quotas, serving.default_quota)
        self._homes = Homes(self._members, self._tenants)
        self._pending = PendingBlocks(self._limits.pending_blocks)
        self._calibration = Calibration(enabled=serving.calibrated)
        self._answers = Answers(self._limits)
        self._explanations = Explanations(self._limits.explanations)
        self._roles = Roles(self._members, serving.roles)
        rules = replication or ReplicationRules()
        self._replication = Replication(self._members, self._index, rules)
        self._admission = Admission(
            Knowledge(
                self._members,
                Sight(self._members, self._index, self._fleet),
                self._fleet,
                self._bookings,
                self._answers,
                self._explanations,
                self._outlook,
                self._tenants,
                self._homes,
                self._pending,
                self._calibration,
            ),
            policy,
        )

    @property
    def index(self) -> PrefixIndex:
        """Which blocks it believes where; for those who compare that with the truth."""
        return self._index

    @property
    def bookings(self) -> Bookings:
        """What is promised to whom beyond what they report; read only."""
        return self._bookings

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take an event at monotonic time ``now_s``; returns what is to be done."""
        if isinstance(event, Question):
            return self._answer(event, now_s)
        if isinstance(event, BlockNews):
            self._index_news(event)
            return []
        return self._news(event, now_s)

    def _answer(self, question: Question, now_s: float) -> list[Command]:
        match question:
            case AdmitAsked():
                return self._admit(question, now_s)
            case GrantWanted():
                return [self._lend(question, now_s)]
            case UseAsked(query, reply_to):
                message = self._tenants.use(query.tenant, self.me.node, now_s)
            case StatusAsked(_, reply_to):
                message = self._status(question, now_s)
            case ExplainAsked(query, reply_to):
                message = self._explanations.explain(query.request)
            case CostsAsked(reply_to):
                message = self._costs.known()
            case _:
                assert_never(question)
        return [Reply(reply_to, message)]

    def _admit(self, asked: AdmitAsked, now_s: float) -> list[Command]:
        decision = self._admission.decide(asked.admit, self.me, now_s, asked.word)
        if isinstance(decision, Consult):
            return [decision]
        copies = self._copies(decision, now_s)
        return [Reply(asked.reply_to, decision.answer), *decision.commands, *copies]

    def _lend(self, wanted: GrantWanted, now_s: float) -> Reply | Consult:
        request = wanted.asked.request
        if self._bookings.has_ended(request):
            over = Denied("the request has had its terminal answer", None)
        else:
            over = self._homes.lend(self.me, wanted.asked, wanted.word, now_s)
        match over:
            case Consult():
                return over
            case Denied(reason, retry_after_ms):
                denied = GrantDenied(
                    request=request, reason=reason, retry_after_ms=retry_after_ms
                )
                return Reply(wanted.reply_to, denied)
            case None:
                return Reply(wanted.reply_to, Granted(request=request))

    def _copies(self, decision: Decision, now_s: float) -> list[TellStore]:
        """What a new placement means for where copies should be."""
        orders: list[TellStore] = []
        for command in decision.commands:
            if isinstance(command, Announce) and isinstance(decision.answer, Placed):
                orders += self._replication.placed(command.made, decision.answer, now_s)
        return orders

    def _index_news(self, news: BlockNews) -> None:
        match news:
            case BlocksMoved(store, added, dropped):
                self._index.apply(store, added, dropped)
            case BlocksWarmed(store, located):
                if self._members.is_live(store):
                    self._index.warm(store, located)
            case StoreForgotten(store):
                self._index.forget(store)
            case StoreExact(store, exact):
                self._index.set_exact(store, exact=exact)
            case _:
                assert_never(news)

    def _news(self, news: News, now_s: float) -> list[Command]:
        match news:
            case PlacementHeard(made):
                if made.conductor != self.me:
                    self._heard(made, now_s)
            case EndHeard(ended):
                return self._ended(ended, now_s)
            case MemberSeen(beat):
                return self._seen(beat, now_s)
            case MemberGone(ref):
                return self._gone(ref, now_s)
            case Fenced(me):
                self.me = me
                self._bookings.clear()
                self._answers.clear()
                self._pending.clear()
                self._tenants.forsake()
            case QuotasRead(quotas):
                self._tenants.replace({**self._quotas, **quotas})
            case Tick():
                self._tick(now_s)
                copies = self._replication.tick(self.me, now_s)
                return [*copies, *self._roles.tick(self.me, now_s)]
            case _:
                assert_never(news)
        return []

    def _heard(self, made: PlacementMade, now_s: float) -> None:
        """Another conductor placed a request."""
        self._replication.heard(made, now_s)
        if self._bookings.book(booking_of(made, now_s)):
            self._outlook.placed(made, now_s)
            tokens = max(0, made.prompt_tokens) + max(0, made.max_new_tokens)
            self._tenants.heard(made.tenant, made.request, tokens, now_s)
        else:
            self._tenants.heard_late(made.tenant, made.request, now_s)

    def _tick(self, now_s: float) -> None:
        idle = {
            beat.node for beat in self._members.live(Role.GATEWAY) if _is_idle(beat)
        }
        for gateway in self._bookings.gateways():
            if gateway in idle or not self._members.is_live(gateway):
                for request in self._bookings.gateway_idle(gateway, now_s):
                    self._tenants.lost(request, now_s)
        self._bookings.tick(now_s)
        self._answers.tick(now_s)
        self._pending.tick(now_s)
        self._tenants.tick(now_s)
        self._index.sweep(self._limits.swept_keys)

    @property
    def exact(self) -> bool:
        """Whether the blocks of every live store are known completely."""
        return all(
            self._index.is_exact(beat.node.node)
            for beat in self._members.live(Role.STORE)
        )

    @property
    def advice(self) -> tuple[RoleAdvice, ...]:
        """How loaded each role of workers is, and how many workers it would need."""
        return self._roles.advice()

    @property
    def costs(self) -> Costs:
        """What was fitted; read only."""
        return self._costs

    def load(self) -> ConductorLoad:
        """What this conductor says of itself in its beats."""
        return ConductorLoad(
            indexed_blocks=self._index.blocks,
            bookings=len(self._bookings),
            exact=self.exact,
        )

    def _seen(self, beat: Beat, now_s: float) -> list[Command]:
        before = self._members.seen(beat)
        if before is not None and before.node.epoch > beat.node.epoch:
            return []
        if before is not None and before.node.epoch < beat.node.epoch:
            self._lost(before, now_s)
        if Role.STORE in beat.roles:
            self._replication.store_seen(beat.node, now_s)
        seen = (beat,)
        if self._costs.seen(beat, before):
            # else those that were asked less would look as quick as the first guess
            seen = self._members.of_class(class_of(beat))
        for each in seen:
            self._fleet.seen(each)
        self._roles.seen(beat)
        self._bookings.reported(beat.node.node, now_s)
        if before is not None and _recorded(before) == _recorded(beat):
            return []
        return [RecordNode(beat)]

    def _gone(self, ref: NodeRef, now_s: float) -> list[Command]:
        beat = self._members.gone(ref)
        if beat is None:
            return []
        self._lost(beat, now_s)
        row = self._fleet.gone(ref.node)
        if row is not None:
            self._outlook.row_gone(row)
        return [RecordNodeGone(ref.node, beat)]

    def _lost(self, beat: Beat, now_s: float) -> None:
        """That life of a node is over, and with it what it held and owned."""
        self._roles.gone(beat.node)
        self._pending.worker_gone(beat.node.node)
        if Role.STORE in beat.roles:
            self._index.forget_life(beat.node)
            self._replication.store_gone(beat.node)
        if Role.GATEWAY in beat.roles:
            for request in self._bookings.gateway_gone(beat.node):
                self._tenants.lost(request, now_s)

    def _ended(self, ended: RequestEnded, now_s: float) -> list[Command]:
        """Close the book; the conductor that placed it records it, if it still lives."""
        booking = self._bookings.end(ended.request, now_s)
        self._outlook.ended(ended, now_s)
        self._pending.remove(ended.request)
        self._calibration.ended(ended, now_s)
        if ended.outcome is Outcome.REJECTED:
            self._tenants.release(ended.request, now_s)
        else:
            used_tokens = max(0, ended.prompt_tokens) + max(0, ended.output_tokens)
            self._tenants.ended(ended.request, used_tokens, now_s)
        ours = self._answers.forget(ended.request) is not None
        theirs = booking is not None and booking.conductor != self.me and not ours
        if booking is not None and theirs and self._members.is_live(booking.conductor):
            return []
        return [RecordEnd(ended, self._explanations.ended(ended))]

    def _status(self, asked: StatusAsked, now_s: float) -> StatusReply:
        return StatusReply(
            nodes=tuple(
                NodeView(
                    beat=member.beat,
                    age_ms=max(0.0, now_s - member.heard_s) * _S_TO_MS,
                    blocks=self._index.copies_at(member.node),
                )
                for member in asked.members
            ),
            indexed_blocks=self._index.blocks,
            indexed_copies=self._index.copies,
            bookings=len(self._bookings),
            exact=self.exact,
        )


def _recorded(beat: Beat) -> tuple[object, ...]:
    """What the catalog keeps of a beat: loads change too often to be kept."""
    return beat.node, beat.roles, beat.host, beat.state, beat.http


def _is_idle(gateway: Beat) -> bool:
    """Whether a gateway says that it has no open requests."""
    return any(
        isinstance(load, GatewayLoad) and load.open_requests == 0
        for load in gateway.load
    )
