"""The conductor among the others: messages become events, commands become deeds.

Thin: it decides nothing. Every event is handled at once, in the order in which the bus
delivers; what is written to the catalog waits in the writer's queue, never here.
"""

from collections.abc import Mapping
from typing import assert_never

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import (
    BlockFollower,
    BusError,
    Handler,
    Hop,
    Incoming,
    Later,
    Node,
    RosterEvent,
    Subscription,
)
from kvtide.bus.messages import (
    Admit,
    CostsQuery,
    ExplainQuery,
    Failure,
    GrantAsked,
    Message,
    NodeState,
    Placed,
    PlacementMade,
    Rejected,
    RequestEnded,
    StatusQuery,
    UseQuery,
)
from kvtide.catalog import Change, Writer
from kvtide.conductor.commands import (
    Announce,
    Command,
    Consult,
    RecordDecision,
    RecordEnd,
    RecordNode,
    RecordNodeGone,
    Reply,
    TellStore,
    TellWorker,
)
from kvtide.conductor.consulting import Consulting
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import (
    AdmitAsked,
    CostsAsked,
    EndHeard,
    Event,
    ExplainAsked,
    Fenced,
    GrantWanted,
    PlacementHeard,
    Question,
    QuotasRead,
    ReplyTo,
    StatusAsked,
    Tick,
    UseAsked,
    member_events,
)
from kvtide.conductor.index_sink import IndexSink
from kvtide.conductor.metrics import ConductorMetrics
from kvtide.conductor.quota import TenantQuota
from kvtide.conductor.records import decision_row, end_rows, node_row
from kvtide.conductor.reducers.roles import RoleAdvice
from kvtide.kv import NodeRef, Role, TenantId
from kvtide.runtime import LimitError

TICK_S = 0.5

_log = structlog.get_logger("kvtide.conductor")


class ConductorService:
    """Runs a dispatcher on a node. ``writer`` None: nothing is recorded."""

    def __init__(
        self,
        node: Node,
        dispatcher: Dispatcher,
        writer: Writer | None,
        registry: CollectorRegistry,
    ) -> None:
        """Nothing is heard before ``start``."""
        self._node = node
        self._dispatcher = dispatcher
        self._writer = writer
        self._metrics = ConductorMetrics(registry)
        self._follower = BlockFollower(node, IndexSink(dispatcher, node.clock))
        self._consulting = Consulting(node, self._handle)
        self._subscriptions: list[Subscription] = []
        self._asked = 0
        self._looking = False
        self._closed = False
        self._exact = False
        self._advice: tuple[RoleAdvice, ...] = ()

    @property
    def advice(self) -> tuple[RoleAdvice, ...]:
        """How many workers of each role the load asks for, as of the last tick.

        From any thread.
        """
        return self._advice

    @property
    def exact(self) -> bool:
        """Whether the blocks of every live store were known at the last tick.

        From any thread.
        """
        return self._exact

    async def look(self) -> None:
        """Learn who is there, what stores hold and what others place. Idempotent."""
        if self._looking:
            return
        self._looking = True
        node = self._node
        node.on_fenced(self._on_fenced)
        node.on_member(self._on_member)
        await self._follower.start()
        await self._listen(node.subjects.all_placements(), self._on_placement)
        await self._listen(node.subjects.all_ended(), self._on_ended)

    async def start(self) -> None:
        """``look``, and take questions."""
        await self.look()
        node = self._node
        for hop in (Hop.ADMIT, Hop.QUERY):
            subject = node.subjects.inbox(Role.CONDUCTOR, node.ref.node, hop)
            await self._listen(subject, self._on_question)
        node.tasks.spawn(self._tick(), name="conductor tick")
        node.set_state(NodeState.READY)
        _log.info("conductor_ready", node=node.ref.node, epoch=node.ref.epoch)

    async def close(self) -> None:
        """Take no more questions. Idempotent."""
        self._closed = True
        self._node.set_state(NodeState.DRAINING)
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.close()
        await self._follower.close()

    def take_quotas(self, quotas: Mapping[TenantId, TenantQuota]) -> None:
        """Tenants' limits as the catalog has them now; they come before the settings'."""
        self._record(self._handle(QuotasRead(quotas)))

    def record_members(self) -> None:
        """Record all live nodes again, after the catalog has lost changes."""
        wall_s = self._node.clock.wall()
        for member in self._node.roster.live():
            self._put(node_row(member.beat, wall_s))

    # ---- what is heard

    async def _on_question(self, incoming: Incoming) -> Message | Later | None:
        began_s = self._node.clock.monotonic()
        question = self._question(incoming)
        if question is None:
            kind = type(incoming.message).__name__
            return Failure(code="unexpected", reason=f"{kind} is no question")
        consulting = self._consulting
        asking = isinstance(question, AdmitAsked | GrantWanted)
        if asking and consulting.is_open(question):
            return None
        commands = self._handle(question)
        if asking and isinstance(commands[0], Consult):
            return Later(self._consulted(question, commands[0], began_s))
        return await self._answered(question, commands, began_s)

    async def _consulted(
        self, question: AdmitAsked | GrantWanted, consult: Consult, began_s: float
    ) -> Message:
        commands = await self._consulting.answered(question, consult)
        return await self._answered(question, commands, began_s)

    async def _answered(
        self, question: Question, commands: list[Command], began_s: float
    ) -> Message:
        reply, *rest = commands
        await self._do(rest)
        if not isinstance(reply, Reply):
            raise TypeError(f"{type(question).__name__} was not answered")
        if isinstance(question, AdmitAsked):
            self._decided(question.admit, reply, began_s)
        return reply.message

    def _question(self, incoming: Incoming) -> Question | None:
        self._asked += 1
        reply_to = ReplyTo(self._asked)
        question: Question | None = None
        match incoming.message:
            case Admit() as admit:
                question = AdmitAsked(admit, reply_to)
            case GrantAsked() as asked:
                question = GrantWanted(asked, reply_to)
            case UseQuery() as query:
                question = UseAsked(query, reply_to)
            case StatusQuery():
                question = StatusAsked(self._node.roster.live(), reply_to)
            case ExplainQuery() as query:
                question = ExplainAsked(query, reply_to)
            case CostsQuery():
                question = CostsAsked(reply_to)
            case _:
                pass
        return question

    async def _on_placement(self, incoming: Incoming) -> None:
        if isinstance(incoming.message, PlacementMade):
            await self._do(self._handle(PlacementHeard(incoming.message)))

    async def _on_ended(self, incoming: Incoming) -> None:
        if isinstance(incoming.message, RequestEnded):
            await self._do(self._handle(EndHeard(incoming.message)))

    def _on_member(self, event: RosterEvent) -> None:
        if self._closed:
            return
        for each in member_events(event):
            self._record(self._handle(each))

    def _on_fenced(self, me: NodeRef) -> None:
        self._record(self._handle(Fenced(me)))

    async def _tick(self) -> None:
        while not self._closed:
            await self._do(self._handle(Tick()))
            load = self._dispatcher.load()
            self._node.report(load)
            self._metrics.load(load)
            self._advice = self._dispatcher.advice
            self._metrics.advice(self._advice)
            self._metrics.fits(self._dispatcher.costs.errors())
            self._exact = load.exact
            await self._node.clock.sleep(TICK_S)

    # ---- what is done

    def _handle(self, event: Event) -> list[Command]:
        return self._dispatcher.handle(event, self._node.clock.monotonic())

    async def _do(self, commands: list[Command]) -> None:
        self._record(commands)
        for command in commands:
            if isinstance(command, Announce):
                await self._announce(command.made)
            elif isinstance(command, TellStore):
                await self._tell_store(command)
            elif isinstance(command, TellWorker):
                await self._tell_worker(command)

    async def _announce(self, made: PlacementMade) -> None:
        """At most once: others then learn of the load from the workers' reports."""
        node = self._node
        try:
            await node.bus.publish(node.subjects.placements(node.ref.node), made)
        except (BusError, LimitError) as error:
            _log.warning(
                "placement_not_announced", request=made.request, error=str(error)
            )

    async def _tell_store(self, command: TellStore) -> None:
        """At most once: a block that stays hot is ordered again by a later placement."""
        subject = self._node.subjects.inbox(Role.STORE, command.store, Hop.QUERY)
        self._metrics.told(command.message)
        try:
            await self._node.bus.publish(subject, command.message)
        except (BusError, LimitError) as error:
            _log.info("store_not_told", store=command.store, error=str(error))

    async def _tell_worker(self, command: TellWorker) -> None:
        """At most once: it is told again until its beats say that it has changed."""
        inbox = self._node.subjects.inbox(command.inbox, command.worker, Hop.CONTROL)
        roles = [str(role) for role in command.message.roles]
        _log.info("worker_told_roles", worker=command.worker, roles=roles)
        try:
            await self._node.bus.publish(inbox, command.message)
        except (BusError, LimitError) as error:
            _log.info("worker_not_told", worker=command.worker, error=str(error))

    def _record(self, commands: list[Command]) -> None:
        wall_s = self._node.clock.wall()
        for command in commands:
            match command:
                case RecordDecision():
                    me = self._node.ref.node
                    self._put(decision_row(command, me, wall_s))
                case RecordEnd(ended, predicted):
                    self._metrics.ended(ended, predicted)
                    for row in end_rows(command, wall_s):
                        self._put(row)
                case RecordNode(beat):
                    self._put(node_row(beat, wall_s))
                case RecordNodeGone(_, beat):
                    self._put(node_row(beat, wall_s, gone=True))
                case Reply() | Consult() | Announce() | TellStore() | TellWorker():
                    pass
                case _:
                    assert_never(command)

    def _put(self, change: Change) -> None:
        if self._writer is not None:
            self._writer.put(change)

    def _decided(self, admit: Admit, reply: Reply, began_s: float) -> None:
        answer = reply.message
        if not isinstance(answer, Placed | Rejected):
            return
        seconds = self._node.clock.monotonic() - began_s
        self._metrics.decided(admit, answer, seconds)
        _log.info(
            "request_placed" if isinstance(answer, Placed) else "request_rejected",
            request=admit.request,
            attempt=admit.attempt,
            reason=answer.reason,
        )

    async def _listen(self, subject: str, handler: Handler) -> None:
        def lost(count: int) -> None:
            self._metrics.lost(subject, count)

        bus = self._node.bus
        self._subscriptions.append(await bus.subscribe(subject, handler, on_lost=lost))
