"""The decode worker's thin shell: messages and results in, commands carried out."""

from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import Gone, Hop, Incoming, Node, Restarted, RosterEvent, Subscription
from kvtide.bus.messages import (
    AnyMessage,
    Cancel,
    DecodeFailed,
    DecodeWork,
    Failure,
    HandoverPlan,
    Message,
    NodeState,
    Owned,
    PartsReady,
    PrefillDone,
    PrefillFailed,
    TokenAck,
    TokenPull,
    Tokens,
)
from kvtide.bus.outbox import Outbox
from kvtide.decode import events
from kvtide.decode.batcher import DecodeMachine
from kvtide.decode.capacity import capacity_tokens
from kvtide.decode.compute import RowWork, compute_step, params_of
from kvtide.decode.ends import failed_end
from kvtide.decode.metrics import DecodeMetrics
from kvtide.decode.operations import Held, Operations
from kvtide.decode.settings import DecodeSettings
from kvtide.engine.errors import EngineError, InvalidSampling, RunClosed
from kvtide.engine.loading import LoadedModel
from kvtide.engine.sampler import Sampler
from kvtide.engine.thread import EngineThread
from kvtide.kv import KeySpace, NodeRef, RequestRef, Role, SpaceId
from kvtide.pool import PoolClient
from kvtide.runtime import KvtideError, TaskScope

LANE = "decode"
TICK_S = 0.05
GIVE_UP_S = 5.0

_Operation = Callable[[], Coroutine[Any, Any, events.Event]]

log = structlog.get_logger("kvtide.decode")


class DecodeService:
    """A decode worker on a node, an engine and a pool that others own.

    ``start`` returns at once; the node says READY when the model is loaded and the
    store on this host can be written to. ``close`` drains, then ends everything.
    """

    def __init__(
        self,
        node: Node,
        engine: EngineThread,
        pool: PoolClient,
        settings: DecodeSettings,
        registry: CollectorRegistry,
    ) -> None:
        """Nothing runs before ``start``."""
        self._node = node
        self._engine = engine
        self._pool = pool
        self._settings = settings
        self._machine = DecodeMachine(node.ref, settings.limits(), self._space)
        self._metrics = DecodeMetrics(registry)
        self._outbox = Outbox(node.bus)
        self._tasks = TaskScope(on_error=self._task_failed)
        self._operations = Operations(node, engine, pool, settings, self._metrics)
        self._sampler = Sampler()
        self._subscriptions: list[Subscription] = []
        self._model: LoadedModel | None = None
        self._store: NodeRef | None = None
        self._held: dict[RequestRef, Held] = {}
        self._closed = False

    # ---- life

    async def start(self) -> None:
        """Listen, and take work as soon as the model is loaded."""
        self._node.on_fenced(self._fenced)
        self._node.on_member(self._member)
        for hop in (Hop.WORK, Hop.CONTROL, Hop.HANDOVER):
            self._subscriptions.append(
                await self._node.inbox(Role.DECODE, hop, self._heard)
            )
        self._tasks.spawn(self._outbox.run(), name="decode outbox")
        self._tasks.spawn(self._load_model(), name="decode model")
        self._tasks.spawn(self._tick(), name="decode tick")

    async def close(self) -> None:
        """Take no more work, let what runs end within the limit, free everything."""
        self._node.set_state(NodeState.DRAINING)
        self._told(events.Drain())
        await self._until_idle(self._settings.drain_s)
        self._told(events.GiveUp())
        await self._outbox.flushed(timeout_s=1.0)
        for subscription in self._subscriptions:
            await subscription.close()
        self._closed = True
        await self._tasks.close()
        for held in self._held.values():
            held.run.close()
        self._held.clear()

    async def _until_idle(self, limit_s: float) -> None:
        clock = self._node.clock
        end_s = clock.monotonic() + limit_s
        while not self._machine.idle and clock.monotonic() < end_s:
            await clock.sleep(TICK_S)

    async def _load_model(self) -> None:
        try:
            model = await self._engine.model()
        except EngineError:
            return  # the process's owner waits for the model too, and ends
        facts = model.facts
        self._model = model
        self._node.models(facts)
        self._told(
            events.ModelLoaded(
                facts.name,
                facts.max_tokens,
                facts.block_tokens,
                facts.layers,
                facts.eos_token_ids,
                capacity_tokens(self._settings, facts),
            )
        )

    async def _tick(self) -> None:
        while True:
            self._watch_store()
            self._told(events.Tick())
            load = self._machine.load()
            self._node.report(load)
            self._metrics.load(load)
            await self._node.clock.sleep(TICK_S)

    def _watch_store(self) -> None:
        store = self._pool.store if self._pool.ready else None
        if store != self._store:
            self._told(events.StoreAttached(attached=store is not None))
            self._store = store
        if self._node.state is not NodeState.DRAINING:
            ready = self._model is not None and store is not None
            self._node.set_state(NodeState.READY if ready else NodeState.LOADING)

    def _space(self, work: DecodeWork) -> KeySpace:
        assert self._model is not None  # noqa: S101 - the machine waits for it
        space = SpaceId(work.tenant, self._model.facts, work.salt)
        return KeySpace(self._node.secret, space)

    # ---- what comes in

    async def _heard(self, incoming: Incoming) -> Message | None:
        message = incoming.message
        if isinstance(message, DecodeWork):
            return self._work(message)
        event = _event_of(message)
        if event is None:
            log.warning("message not for decode", type=type(message).__name__)
            return None
        return self._told(event)

    def _work(self, work: DecodeWork) -> Message | None:
        try:
            params_of(work.sampling)
        except InvalidSampling as error:
            return Failure(code="invalid_sampling", reason=str(error))
        return self._told(events.WorkArrived(work))

    def _member(self, event: RosterEvent) -> None:
        if isinstance(event, Gone):
            self._told(events.MemberGone(event.member.ref))
        elif isinstance(event, Restarted):
            self._told(events.MemberGone(event.before.ref))

    def _fenced(self, me: NodeRef) -> None:
        self._told(events.Fenced(me))

    # ---- what goes out

    def _told(self, event: events.Event) -> Message | None:
        """Tell the machine, do what it says; its reply if it has one."""
        reply: Message | None = None
        if self._closed:
            return reply
        waiting = deque([event])
        while waiting:
            now_s = self._node.clock.monotonic()
            for command in self._machine.handle(waiting.popleft(), now_s):
                if isinstance(command, events.Reply):
                    reply = command.message
                else:
                    waiting.extend(self._carry_out(command))
        self._engine.claim(LANE, wanted=self._machine.stepping)
        return reply

    def _carry_out(self, command: events.Command) -> tuple[events.Event, ...]:
        """Do it; what the machine is to be told if that failed.

        One that fails must not take those after it along.
        """
        try:
            self._do(command)
        except Exception as error:  # noqa: BLE001 - as above
            ended = self._failed(command, error)
            return () if ended is None else (ended,)
        return ()

    def _do(self, command: events.Command) -> None:
        match command:
            case events.ToGateway(gateway, message):
                inbox = self._node.subjects.inbox(
                    Role.GATEWAY, gateway.node, Hop.TOKENS
                )
                self._outbox.post(inbox, message)
                if isinstance(message, Tokens | DecodeFailed):
                    self._said(message)
            case events.AskHandover():
                self._spawn(partial(self._operations.ask, command), command)
            case events.TellTaken():
                tell = partial(self._operations.tell_taken, command)
                self._spawn(tell, command)
            case events.Step():
                self._spawn(partial(self._run_step, command), command)
            case _:
                self._do_for_run(command)

    def _do_for_run(self, command: events.Command) -> None:
        match command:
            case events.Open(work, ref, capacity):
                assert self._model is not None  # noqa: S101 - the machine waits for it
                run = self._model.new_run(capacity)
                self._held[ref] = Held(work, self._space(work), run)
            case events.ReadCopies(ref):
                held = self._opened(ref)
                read = partial(self._operations.read_copies, held, command)
                self._spawn(read, command)
            case events.ReadParts(ref):
                held = self._opened(ref)
                read = partial(self._operations.read_parts, held, command)
                self._spawn(read, command)
            case events.PutBlocks(ref):
                held = self._opened(ref)
                put = partial(self._operations.put_blocks, held, command)
                self._spawn(put, command)
            case events.Free(ref):
                held = self._held.pop(ref, None)
                if held is not None:  # else it could not be opened
                    held.run.close()
            case _:
                raise AssertionError(command)

    def _opened(self, ref: RequestRef) -> Held:
        held = self._held.get(ref)
        if held is None:
            raise RunClosed("its run could not be made")
        return held

    def _spawn(self, operation: _Operation, command: events.Command) -> None:
        name = f"decode {_name(command)}"
        self._tasks.spawn(self._run(operation, command), name=name)

    async def _run(self, operation: _Operation, command: events.Command) -> None:
        """Whatever happens, the operation ends with its event: nobody may hang."""
        ended: events.Event | None
        try:
            ended = await operation()
        except Exception as error:  # noqa: BLE001 - as above
            ended = self._failed(command, error)
        if ended is not None:
            self._told(ended)

    def _failed(self, command: events.Command, error: Exception) -> events.Event | None:
        name = _name(command)
        foreseen = isinstance(error, KvtideError)
        log.error(
            "operation failed",
            operation=name,
            error=type(error).__name__,
            reason=str(error),
            exc_info=None if foreseen else error,
        )
        self._metrics.operation_failed(name)
        return failed_end(command, str(error))

    def _said(self, message: Tokens | DecodeFailed) -> None:
        self._metrics.said(message)
        if isinstance(message, DecodeFailed):
            log.warning(
                "decode failed",
                request=message.request,
                attempt=message.attempt,
                code=message.code,
                reason=message.reason,
            )
        elif message.finish is not None:
            log.info(
                "decode finished",
                request=message.request,
                attempt=message.attempt,
                finish=message.finish,
                count=message.index + len(message.ids),
            )

    async def _run_step(self, step: events.Step) -> events.Event:
        model, clock = self._model, self._node.clock
        assert model is not None  # noqa: S101 - the machine waits for it
        rows = [
            RowWork(row, self._held[row.ref].run)
            for row in step.rows
            if row.ref in self._held  # else it could not be opened, and has failed
        ]
        seconds = 0.0

        def call() -> tuple[tuple[events.Sampled, ...], tuple[events.RowFailed, ...]]:
            nonlocal seconds
            started_s = clock.monotonic()
            drawn = compute_step(model.runner, self._sampler, rows)
            seconds = clock.monotonic() - started_s
            return drawn

        done = events.StepOutcome.DONE
        try:
            sampled, broken = await self._engine.run(LANE, call)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may hang
            log.warning("step failed", reason=str(error), error=type(error).__name__)
            failed = events.StepOutcome.FAILED
            return events.StepEnded(step.step, failed, 0.0, reason=str(error))
        self._node.count_step()
        self._metrics.stepped(seconds)
        return events.StepEnded(step.step, done, seconds * 1000, sampled, failed=broken)

    def _task_failed(self, error: BaseException) -> None:
        log.error("decode task failed", exc_info=error)


def _name(command: events.Command) -> str:
    return type(command).__name__.lower()


def _event_of(message: AnyMessage) -> events.Event | None:
    event: events.Event | None = None
    match message:
        case Cancel():
            event = events.CancelArrived(message)
        case Owned():
            event = events.OwnedArrived(message)
        case TokenAck():
            event = events.AckArrived(message)
        case TokenPull():
            event = events.PullArrived(message)
        case HandoverPlan() | PartsReady() | PrefillDone() | PrefillFailed():
            event = events.HandoverSaid(message)
        case _:
            pass
    return event
