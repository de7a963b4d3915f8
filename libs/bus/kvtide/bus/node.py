"""The chassis that every role stands on: bus, transfer, roster, beats, identity."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar

import structlog

from kvtide.bus.beater import Beater, NodeTimes, Pulse
from kvtide.bus.errors import BusError, EpochError
from kvtide.bus.identity import Identity
from kvtide.bus.interface import Bus, Handler, Incoming, Lost, Subscription
from kvtide.bus.messages import Beat, Goodbye, Load, NodeState
from kvtide.bus.roster import Joined, Roster, RosterEvent
from kvtide.bus.subjects import Hop, Subjects
from kvtide.bus.vitals import Vitals
from kvtide.kv import ModelFacts, NodeRef, Role
from kvtide.runtime import Clock, TaskScope
from kvtide.runtime.tracing import NO_TRACES, Tracer
from kvtide.transfer import RegionHandle, TransferEndpoint

OnMember = Callable[[RosterEvent], None]
OnFenced = Callable[[NodeRef], None]

Event = TypeVar("Event")

log = structlog.get_logger("kvtide.bus.node")

HEARD_AFTER_BEATS = 1.5
"""Everybody beats once in a period; the half is for the way."""


class NodeBus(Bus, Protocol):
    """What a node needs of its bus beside sending and hearing."""

    def fence(self, fence: Callable[[NodeRef], bool]) -> None:
        """Drop messages of senders that ``fence`` is false for, from now on."""
        ...

    def beater(self) -> Beater:
        """Something that beats for a node on this bus, over a way of its own."""
        ...


class Node:
    """One process among the others. Use as an async context manager, in one loop.

    The bus and the endpoint are started before and closed after, by their owner
    (``open_node`` does both). Callbacks run in the loop and must be quick; one that
    raises is logged, the others still run.
    """

    def __init__(
        self,
        *,
        roles: tuple[Role, ...],
        bus: NodeBus,
        identity: Identity,
        clock: Clock,
        secret: bytes,
        beater: Beater | None = None,
        endpoint: TransferEndpoint | None = None,
        times: NodeTimes | None = None,
        host: str = "",
        http: str = "",
        tasks: TaskScope | None = None,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        """``beater`` None: the bus's own. ``tasks``: what runs the node's tasks."""
        self.roles = roles
        self.bus = bus
        self.identity = identity
        self.clock = clock
        self.secret = secret
        self.tracer = tracer
        self.times = times or NodeTimes()
        self.roster = Roster(self.times.roster)
        self.tasks = TaskScope(on_error=self._failed) if tasks is None else tasks
        self._endpoint = endpoint
        self._beater = beater or bus.beater()
        self._vitals = Vitals(roles, host, clock.wall())
        self._vitals.set_http(http)
        self._members: list[OnMember] = []
        self._fenced: list[OnFenced] = []
        self._subscriptions: list[Subscription] = []

    # ---- who and where

    @property
    def ref(self) -> NodeRef:
        """This life of this node."""
        return self.identity.current

    @property
    def subjects(self) -> Subjects:
        """The cluster's subjects."""
        return self.bus.subjects

    @property
    def endpoint(self) -> TransferEndpoint:
        """Where bulk bytes go.

        Raises:
            RuntimeError: the node was made without one.
        """
        if self._endpoint is None:
            message = "this node has no transfer endpoint"
            raise RuntimeError(message)
        return self._endpoint

    @property
    def state(self) -> NodeState:
        """What it says that it is ready for."""
        return self._vitals.state

    @property
    def host(self) -> str:
        """Equal for nodes that share memory with this one; "" if none can."""
        return self._vitals.host

    # ---- what it says of itself

    def set_state(self, state: NodeState) -> None:
        """Say what it is ready for; others hear at once."""
        if self._vitals.set_state(state):
            self._beater.poke()

    def report(self, *loads: Load) -> None:
        """Say how loaded it is; others hear soon if that changed."""
        if self._vitals.set_load(*loads):
            self._beater.poke()

    def count_step(self, count: int = 1) -> None:
        """The engine moved on. From any thread."""
        self._vitals.count_steps(count)

    def set_roles(self, roles: tuple[Role, ...]) -> None:
        """Say which roles it takes work of from now on; its inboxes stay."""
        self.roles = roles
        self._vitals.set_roles(roles)
        self._beater.poke()

    def models(self, *models: ModelFacts) -> None:
        """Say which models it serves."""
        self._vitals.set_models(models)
        self._beater.poke()

    def set_worker_class(self, name: str) -> None:
        """Say which workers it is as fast as; "" is not known."""
        self._vitals.set_worker_class(name)
        self._beater.poke()

    def arenas(self, *arenas: RegionHandle) -> None:
        """Say where a store's blocks can be read."""
        self._vitals.set_arenas(arenas)
        self._beater.poke()

    def set_http(self, http: str) -> None:
        """Say where its health and metrics are."""
        self._vitals.set_http(http)
        self._beater.poke()

    # ---- what it hears

    def on_member(self, callback: OnMember) -> None:
        """Hear of others (and of itself), beginning with a join of each live one."""
        self._members.append(callback)
        for member in self.roster.live():
            self._call(callback, Joined(member))

    def on_fenced(self, callback: OnFenced) -> None:
        """Hear that this process was paused for so long that it counts as dead.

        ``callback`` gets the new life. It must drop all that the old one held, and
        tell nobody: they have gone on without it.
        """
        self._fenced.append(callback)

    async def inbox(
        self,
        role: Role,
        hop: Hop | str,
        handler: Handler,
        *,
        limit: int = 4096,
        on_lost: Lost | None = None,
    ) -> Subscription:
        """Listen on one of this node's inboxes; as ``Bus.subscribe``."""
        subject = self.subjects.inbox(role, self.ref.node, hop)
        return await self.bus.subscribe(subject, handler, limit=limit, on_lost=on_lost)

    async def hear_others(self) -> None:
        """Wait until all who live have had the time to beat, and so are in the roster."""
        await self.clock.sleep(HEARD_AFTER_BEATS * self.times.beat_s)

    # ---- life

    async def start(self) -> None:
        """Listen to others and begin to beat; called by ``async with``."""
        if self._endpoint is not None:
            self._vitals.set_transfer(self._endpoint.address)
        self.bus.fence(self.roster.is_current)
        subjects = self.subjects
        self._subscriptions = [
            await self.bus.subscribe(subjects.beats(), self._on_beat),
            await self.bus.subscribe(subjects.goodbyes(), self._on_goodbye),
        ]
        self.tasks.spawn(self._watch(), name="roster")
        pulse = Pulse(
            self._vitals,
            self.identity,
            subjects,
            self.clock,
            self.times,
            self._fence_self,
        )
        await self._beater.start(pulse)

    async def close(self) -> None:
        """Say goodbye and end all tasks. Idempotent."""
        await self._beater.close()
        try:
            goodbye = Goodbye(node=self.ref)
            await self.bus.publish(self.subjects.goodbye(self.ref.node), goodbye)
        except BusError as error:
            log.debug("goodbye not sent", error=str(error))
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.close()
        await self.tasks.close()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    # ---- inside

    async def _on_beat(self, incoming: Incoming) -> None:
        if isinstance(incoming.message, Beat):
            self._tell(self.roster.beat(incoming.message, self.clock.monotonic()))

    async def _on_goodbye(self, incoming: Incoming) -> None:
        if isinstance(incoming.message, Goodbye):
            self._tell(self.roster.goodbye(incoming.message))

    async def _watch(self) -> None:
        tick_s = self.times.tick_s
        last_s = self.clock.monotonic()
        while True:
            await self.clock.sleep(tick_s)
            now_s = self.clock.monotonic()
            # while cut off, or after a pause, silence says nothing of the others
            deaf = not self.bus.connected or now_s - last_s > 4 * tick_s
            if deaf:
                self.roster.grace(now_s)
            last_s = now_s
            self._tell(self.roster.tick(now_s))

    async def _fence_self(self) -> None:
        try:
            ref = self.identity.advance()
        except EpochError as error:
            # the next start takes the wall clock, which is greater
            log.error("epoch not kept", error=str(error))  # noqa: TRY400
            ref = self.identity.advance_unkept()
        log.warning("paused and fenced", node=ref.node, epoch=ref.epoch)
        self.roster.grace(self.clock.monotonic())
        self._vitals.forget_load()
        for callback in list(self._fenced):
            self._call(callback, ref)

    def _tell(self, events: list[RosterEvent]) -> None:
        for event in events:
            for callback in list(self._members):
                self._call(callback, event)

    def _call(self, callback: Callable[[Event], None], event: Event) -> None:
        try:
            callback(event)
        except Exception:
            log.exception("node callback failed", about=repr(event))

    def _failed(self, error: BaseException) -> None:
        log.error("node task failed", exc_info=error)
