"""Drives a worker's machine: what its process hears goes in, what it says is done.

The shells of workers and the simulator's are drivers; it waits for nothing but the
node's clock and bus, so that it runs in virtual time too.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import structlog

from kvtide.bus import Gone, Hop, Incoming, Node, Restarted, RosterEvent, Subscription
from kvtide.bus.messages import (
    AnyMessage,
    Cancel,
    ChangeRoles,
    Failure,
    Load,
    Message,
    NodeState,
    Owned,
)
from kvtide.kv import NodeRef, Role
from kvtide.runtime import TaskScope
from kvtide.worker import events
from kvtide.worker.events import CommonEvent, Reply, ToGateway, ToPeers

TICK_S = 0.05

E = TypeVar("E")
C = TypeVar("C")
E_contra = TypeVar("E_contra", contravariant=True)
C_co = TypeVar("C_co", covariant=True)

log = structlog.get_logger("kvtide.worker")


class Machine(Protocol[E_contra, C_co]):
    """The pure core of a worker."""

    def handle(self, event: E_contra | CommonEvent, now_s: float) -> Sequence[C_co]:
        """Take one event; the commands are to be carried out in order."""
        ...

    def load(self) -> Load:
        """What the conductor is told."""
        ...


class Driver(ABC, Generic[E, C]):
    """One machine of one role on a node. Subclasses carry its commands out."""

    def __init__(
        self,
        node: Node,
        role: Role,
        hops: Sequence[Hop],
        machine: Machine[E, C],
        tasks: TaskScope,
    ) -> None:
        """Nothing is heard before ``listen``; ``hops`` are the inboxes."""
        self._node = node
        self._role = role
        self._hops = hops
        self._driven = machine
        self._tasks = tasks
        self._subscriptions: list[Subscription] = []
        self._attached: NodeRef | None = None
        self._closed = False

    async def listen(self) -> None:
        """Hear work and what ends it, and let time pass."""
        self._node.on_fenced(self._fenced)
        self._node.on_member(self._member)
        for hop in self._hops:
            self._subscriptions.append(
                await self._node.inbox(self._role, hop, self._heard)
            )
        if self._role is Role.PREFILL:
            making = self._node.subjects.all_making()
            self._subscriptions.append(
                await self._node.bus.subscribe(making, self._heard)
            )
        self._tasks.spawn(self._tick(), name=f"{self._role} tick")

    # ---- what a subclass knows

    @abstractmethod
    def _store(self) -> NodeRef | None:
        """The store on this host that takes blocks now."""

    @abstractmethod
    def _event_of(self, message: AnyMessage) -> E | None:
        """What the machine is told of a message of this role alone."""

    @abstractmethod
    def _do(self, command: C) -> None:
        """Carry a command out, or begin to."""

    @abstractmethod
    def _post(self, subject: str, message: Message) -> None:
        """Publish soon, in order; it may be lost."""

    @abstractmethod
    def _failed(self, command: C, error: Exception) -> E | CommonEvent | None:
        """A command or its operation has raised: what the machine is told."""

    @property
    def _usable(self) -> bool:
        """Whether work can be done, a store apart."""
        return True

    def _reported(self, load: Load) -> None:
        """The load as others are told it."""

    # ---- what comes in

    async def _tick(self) -> None:
        while True:
            self._watch_store()
            self._tell(events.Tick())
            load = self._driven.load()
            self._node.report(load)
            self._reported(load)
            await self._node.clock.sleep(TICK_S)

    def _watch_store(self) -> None:
        store = self._store()
        if store != self._attached:
            if self._attached is not None:  # also when another life of it came at once
                self._tell(events.StoreAttached(attached=False))
            if store is not None:
                self._tell(events.StoreAttached(attached=True, node=store.node))
            self._attached = store
        if self._node.state is not NodeState.DRAINING:
            ready = self._usable and store is not None
            self._node.set_state(NodeState.READY if ready else NodeState.LOADING)

    async def _heard(self, incoming: Incoming) -> Message | None:
        match incoming.message:
            case Cancel() as cancel:
                return self._tell(events.CancelArrived(cancel))
            case Owned() as owned:
                return self._tell(events.OwnedArrived(owned))
            case ChangeRoles() as change:
                return self._change_roles(change)
            case message:
                return self._hear(message)

    def _change_roles(self, change: ChangeRoles) -> Message:
        del change
        return Failure(code="fixed", reason="this worker was started for one role")

    def _hear(self, message: AnyMessage) -> Message | None:
        event = self._event_of(message)
        if event is None:
            kind = type(message).__name__
            log.warning("message not for this role", type=kind, role=self._role)
            return None
        return self._tell(event)

    def _member(self, event: RosterEvent) -> None:
        if isinstance(event, Gone):
            self._tell(events.MemberGone(event.member.ref))
        elif isinstance(event, Restarted):
            self._tell(events.MemberGone(event.before.ref))

    def _fenced(self, me: NodeRef) -> None:
        self._tell(events.Fenced(me))

    # ---- what goes out

    def _tell(self, event: E | CommonEvent) -> Message | None:
        """Tell the machine, do what it says; its reply if it has one."""
        reply: Message | None = None
        waiting: deque[E | CommonEvent] = deque([] if self._closed else [event])
        while waiting:
            now_s = self._node.clock.monotonic()
            for command in self._driven.handle(waiting.popleft(), now_s):
                if isinstance(command, Reply):
                    reply = command.message
                else:
                    waiting.extend(self._carry_out(command))
        return reply

    def _carry_out(self, command: C) -> tuple[E | CommonEvent, ...]:
        """Do it; what the machine is to be told if that failed.

        One that fails must not take those after it along.
        """
        try:
            if isinstance(command, ToGateway):
                self._to(Role.GATEWAY, command.gateway, Hop.TOKENS, command.message)
            if isinstance(command, ToPeers):
                self._to_peers(command.message)
            else:
                self._do(command)
        except Exception as error:  # noqa: BLE001 - as above
            ended = self._failed(command, error)
            return () if ended is None else (ended,)
        return ()

    def _to(self, role: Role, node: NodeRef, hop: Hop, message: Message) -> None:
        self._post(self._node.subjects.inbox(role, node.node, hop), message)

    def _to_peers(self, message: Message) -> None:
        """What nobody would hear is not said."""
        me = self._node.ref.node
        if any(one.node != me for one in self._node.roster.live(self._role)):
            self._post(self._node.subjects.making(me), message)

    def _spawn(
        self,
        operation: Callable[..., Coroutine[Any, Any, E | None]],
        command: C,
        *parts: object,
    ) -> None:
        """Run ``operation(*parts)``, which ends with what the machine is told."""
        work = partial(operation, *parts)
        name = f"{self._role} {name_of(command)}"
        self._tasks.spawn(self._run(work, command), name=name)

    async def _run(
        self, operation: Callable[[], Coroutine[Any, Any, E | None]], command: C
    ) -> None:
        """Whatever happens, the operation ends with its event: nobody may hang."""
        ended: E | CommonEvent | None
        try:
            ended = await operation()
        except Exception as error:  # noqa: BLE001 - as above
            ended = self._failed(command, error)
        if ended is not None:
            self._tell(ended)


def name_of(command: object) -> str:
    """A command's name in logs and metrics."""
    return type(command).__name__.lower()
