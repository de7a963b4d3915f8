"""What each role of a worker's process is, whatever engine computes for it."""

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import Hop, Node
from kvtide.bus.messages import (
    AnyMessage,
    ChangeRoles,
    DecodeWork,
    Failure,
    Message,
    NodeState,
    PrefillWork,
    WorkRefused,
)
from kvtide.bus.outbox import Outbox
from kvtide.kv import ModelFacts, NodeRef, Role
from kvtide.pool import PoolClient
from kvtide.runtime import KvtideError, TaskScope
from kvtide.runtime.tracing import TRACE
from kvtide.worker import events
from kvtide.worker.driver import TICK_S, Driver, Machine, name_of
from kvtide.worker.metrics import WorkerMetrics
from kvtide.worker.spans import RequestSpans, named_by
from kvtide.worker.turning import RoleKeeper

GIVE_UP_S = 5.0
FIRST_STAGE = "queue"
"""What each request's span begins with: until its first step."""

E = TypeVar("E")
C = TypeVar("C")
E_contra = TypeVar("E_contra", contravariant=True)
C_co = TypeVar("C_co", covariant=True)

log = structlog.get_logger("kvtide.worker")


class Frame(Protocol):
    """What the services of a worker's process share, whatever engine it has."""

    node: Node
    pool: PoolClient
    registry: CollectorRegistry
    roles: RoleKeeper | None


class IdleMachine(Machine[E_contra, C_co], Protocol[E_contra, C_co]):
    """A machine that says when nothing is left to be done."""

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is held."""
        ...


class RoleService(Driver[E, C]):
    """One role of a worker.

    ``start`` returns at once; the node says READY when the model is loaded and the
    store on this host can be written to. ``close`` drains, then ends everything.
    """

    def __init__(
        self,
        frame: Frame,
        role: Role,
        hops: Sequence[Hop],
        machine: IdleMachine[E, C],
        metrics: WorkerMetrics,
        *,
        drain_s: float,
    ) -> None:
        """Nothing runs before ``start``."""
        tasks = TaskScope(on_error=self._task_failed)
        super().__init__(frame.node, role, hops, machine, tasks)
        self._pool = frame.pool
        self._frame = frame
        self._idle_machine = machine
        self._counts = metrics
        self._drain_s = drain_s
        self._outbox = Outbox(frame.node.bus)
        self._has_model = False
        self._spans = RequestSpans(frame.node.tracer, role)

    # ---- life

    async def start(self) -> None:
        """Listen, and take work as soon as the model is loaded."""
        await self.listen()
        self._tasks.spawn(self._outbox.run(), name=f"{self._role} outbox")
        self._tasks.spawn(self._load_model(), name=f"{self._role} model")

    async def close(self) -> None:
        """Take no more work, let what runs end within the limit, free everything."""
        self._node.set_state(NodeState.DRAINING)
        self._tell(events.Drain())
        await self._until_idle(self._drain_s)
        self._tell(events.GiveUp())
        await self._until_idle(self._give_up_s)
        await self._outbox.flushed(timeout_s=1.0)
        for subscription in self._subscriptions:
            await subscription.close()
        self._closed = True
        await self._tasks.close()
        await self._drop_all()

    async def _until_idle(self, limit_s: float) -> None:
        clock = self._node.clock
        end_s = clock.monotonic() + limit_s
        while not self._idle_machine.idle and clock.monotonic() < end_s:
            await clock.sleep(TICK_S)

    async def _load_model(self) -> None:
        loaded = await self._wait_loaded()
        if loaded is None:
            return  # the process's owner waits for the model too, and ends
        models, event = loaded
        self._has_model = True
        self._node.models(*models)
        self._tell(event)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is held."""
        return self._idle_machine.idle

    def take_work(self, *, taken: bool) -> None:
        """Take new work, or none; what is there goes on."""
        self._tell(events.Resume() if taken else events.Drain())

    def _change_roles(self, change: ChangeRoles) -> Message:
        roles = self._frame.roles
        return super()._change_roles(change) if roles is None else roles.change(change)

    # ---- what a role knows

    _give_up_s = GIVE_UP_S
    """How long what was given up may take to end."""

    _caused: tuple[type, ...] = ()
    """Commands that are traced as part of what another worker said last."""

    @abstractmethod
    async def _wait_loaded(self) -> tuple[Sequence[ModelFacts], E] | None:
        """What is served, and what the machine is told of it; None: it failed."""

    @abstractmethod
    async def _drop_all(self) -> None:
        """Close what is still open; no task runs any more."""

    # ---- for a driver

    @property
    def _usable(self) -> bool:
        return self._has_model

    def _store(self) -> NodeRef | None:
        return self._pool.store if self._pool.ready else None

    def _post(self, subject: str, message: Message) -> None:
        ref = named_by(message) if self._spans.enabled else None
        self._outbox.post(
            subject, message, "" if ref is None else self._spans.trace(ref)
        )

    def _hear(self, message: AnyMessage) -> Message | None:
        ref = named_by(message) if self._spans.enabled else None
        if ref is None:
            return super()._hear(message)
        if not isinstance(message, PrefillWork | DecodeWork):
            self._spans.told(ref)
            return super()._hear(message)
        self._spans.arrived(ref, prompt_tokens=len(message.tokens))
        self._spans.first((ref,), FIRST_STAGE)
        reply = super()._hear(message)
        if isinstance(reply, WorkRefused | Failure):
            self._spans.ended(ref, reply.code)
        return reply

    async def _run(
        self, operation: Callable[[], Coroutine[Any, Any, E | None]], command: C
    ) -> None:
        if not self._spans.enabled:
            await super()._run(operation, command)
            return
        # a task inherits the trace of whatever happened to begin it
        TRACE.set("")
        ref = named_by(command)
        if ref is None:
            await super()._run(operation, command)
            return
        caused = isinstance(command, self._caused)
        with self._spans.operation(ref, name_of(command), caused=caused):
            await super()._run(operation, command)

    def _failed(self, command: C, error: Exception) -> E | events.CommonEvent | None:
        name = name_of(command)
        foreseen = isinstance(error, KvtideError)
        log.error(
            "operation failed",
            role=self._role,
            operation=name,
            error=type(error).__name__,
            reason=str(error),
            exc_info=None if foreseen else error,
        )
        self._counts.operation_failed(name)
        return self._failed_end(command, str(error))

    @abstractmethod
    def _failed_end(self, command: C, reason: str) -> E | events.CommonEvent | None:
        """The event that ends ``command`` without its result; None: nobody waits."""

    def _task_failed(self, error: BaseException) -> None:
        log.error("worker task failed", role=self._role, exc_info=error)
