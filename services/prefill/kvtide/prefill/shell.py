"""The prefill worker's thin shell: messages and results in, commands carried out."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import Gone, Hop, Incoming, Node, Restarted, RosterEvent, Subscription
from kvtide.bus.messages import (
    Cancel,
    HandoverPull,
    HandoverTaken,
    Message,
    NodeState,
    Owned,
    PartSums,
    PrefillDone,
    PrefillFailed,
    PrefillWork,
)
from kvtide.bus.outbox import Outbox
from kvtide.engine.errors import EngineError, RunClosed, StepCancelled
from kvtide.engine.loading import LoadedModel
from kvtide.engine.memory import KvRun
from kvtide.engine.thread import EngineThread
from kvtide.kv import KeySpace, Lease, NodeRef, RequestRef, Role, SpaceId
from kvtide.pool import PartSink, PoolClient, PoolError, Put
from kvtide.prefill import events
from kvtide.prefill.compute import Announce, ChunkWork, StepCompute
from kvtide.prefill.ends import failed_end
from kvtide.prefill.metrics import PrefillMetrics
from kvtide.prefill.queue import PrefillMachine
from kvtide.prefill.settings import PrefillSettings
from kvtide.runtime import KvtideError, TaskScope

LANE = "prefill"
TICK_S = 0.05
GIVE_UP_S = 5.0

_Operation = Callable[[], Coroutine[Any, Any, events.Event | None]]

log = structlog.get_logger("kvtide.prefill")


@dataclass(slots=True)
class _Held:
    """What the shell keeps for a job that is open."""

    work: PrefillWork
    space: KeySpace
    run: KvRun
    put: Put | None = None


class PrefillService:
    """A prefill worker on a node, an engine and a pool that others own.

    ``start`` returns at once; the node says READY when the model is loaded and the
    store on this host can be written to. ``close`` drains, then ends everything.
    """

    def __init__(
        self,
        node: Node,
        engine: EngineThread,
        pool: PoolClient,
        settings: PrefillSettings,
        registry: CollectorRegistry,
    ) -> None:
        """Nothing runs before ``start``."""
        self._node = node
        self._engine = engine
        self._pool = pool
        self._settings = settings
        self._machine = PrefillMachine(node.ref, settings.limits())
        self._metrics = PrefillMetrics(registry)
        self._outbox = Outbox(node.bus)
        self._tasks = TaskScope(on_error=self._task_failed)
        self._subscriptions: list[Subscription] = []
        self._model: LoadedModel | None = None
        self._store: NodeRef | None = None
        self._held: dict[RequestRef, _Held] = {}
        self._step: StepCompute | None = None
        self._closed = False
        self._shared = False

    # ---- life

    async def start(self) -> None:
        """Listen, and take work as soon as the model is loaded."""
        self._node.on_fenced(self._fenced)
        self._node.on_member(self._member)
        for hop in (Hop.WORK, Hop.CONTROL):
            self._subscriptions.append(
                await self._node.inbox(Role.PREFILL, hop, self._heard)
            )
        self._tasks.spawn(self._outbox.run(), name="prefill outbox")
        self._tasks.spawn(self._load_model(), name="prefill model")
        self._tasks.spawn(self._tick(), name="prefill tick")

    async def close(self) -> None:
        """Take no more work, let what runs end within the limit, free everything."""
        self._node.set_state(NodeState.DRAINING)
        self._tell(events.Drain())
        await self._until_idle(self._settings.drain_s)
        self._tell(events.GiveUp())
        await self._until_idle(GIVE_UP_S)
        await self._outbox.flushed(timeout_s=1.0)
        for subscription in self._subscriptions:
            await subscription.close()
        self._closed = True
        await self._tasks.close()
        for held in self._held.values():
            held.run.close()
            if held.put is not None:
                await held.put.release()
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
        self._tell(events.ModelLoaded(facts.name, facts.max_tokens, facts.block_tokens))

    async def _tick(self) -> None:
        while True:
            self._watch_store()
            self._tell(events.Tick())
            self._node.report(self._machine.load())
            self._metrics.load(self._machine.load())
            await self._node.clock.sleep(TICK_S)

    def _watch_store(self) -> None:
        store = self._pool.store if self._pool.ready else None
        if store != self._store:
            if self._store is not None:
                self._tell(events.StoreAttached(attached=False))
            if store is not None:
                self._tell(events.StoreAttached(attached=True))
            self._store = store
        if self._node.state is not NodeState.DRAINING:
            ready = self._model is not None and store is not None
            self._node.set_state(NodeState.READY if ready else NodeState.LOADING)

    # ---- what comes in

    async def _heard(self, incoming: Incoming) -> Message | None:
        match incoming.message:
            case PrefillWork() as work:
                return self._tell(events.WorkArrived(work))
            case Cancel() as cancel:
                return self._tell(events.CancelArrived(cancel))
            case Owned() as owned:
                return self._tell(events.OwnedArrived(owned))
            case HandoverPull() as pull:
                return self._tell(events.PullArrived(pull))
            case HandoverTaken() as taken:
                return self._tell(events.TakenArrived(taken))
            case other:
                log.warning("message not for prefill", type=type(other).__name__)
                return None

    def _member(self, event: RosterEvent) -> None:
        if isinstance(event, Gone):
            self._tell(events.MemberGone(event.member.ref))
        elif isinstance(event, Restarted):
            self._tell(events.MemberGone(event.before.ref))

    def _fenced(self, me: NodeRef) -> None:
        for held in self._held.values():
            held.put = None  # the pool's client has dropped it
        self._tell(events.Fenced(me))

    # ---- what goes out

    def _tell(self, event: events.Event) -> Message | None:
        """Tell the machine, do what it says; its reply if it has one."""
        shared = self._engine.contended(LANE)
        if shared != self._shared:
            self._shared = shared
            self._tell(events.EngineShared(shared=shared))
        reply: Message | None = None
        waiting = deque([] if self._closed else [event])
        while waiting:
            now_s = self._node.clock.monotonic()
            for command in self._machine.handle(waiting.popleft(), now_s):
                if isinstance(command, events.Reply):
                    reply = command.message
                else:
                    waiting.extend(self._carry_out(command))
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
        subjects = self._node.subjects
        match command:
            case events.ToDecode(decode, message):
                inbox = subjects.inbox(Role.DECODE, decode.node, Hop.HANDOVER)
                self._outbox.post(inbox, message)
            case events.ToGateway(gateway, message):
                inbox = subjects.inbox(Role.GATEWAY, gateway.node, Hop.TOKENS)
                self._outbox.post(inbox, message)
                if isinstance(message, PrefillDone | PrefillFailed):
                    self._ended(message)
            case events.Step():
                self._spawn(partial(self._run_step, command), command)
            case events.Abort():
                if self._step is not None:
                    self._step.abort()
            case _:
                self._do_for_job(command)

    def _do_for_job(self, command: events.Command) -> None:
        match command:
            case events.Open(work, ref, capacity):
                self._open(work, ref, capacity)
            case events.Load():
                self._spawn(partial(self._load, command), command)
            case events.Begin():
                self._spawn(partial(self._begin, command), command)
            case events.Commit(ref):
                self._spawn(partial(self._commit, ref), command)
            case events.Release(ref):
                held = self._held.get(ref)
                if held is not None and held.put is not None:
                    self._spawn(held.put.release, command)
                    held.put = None
                self._forget_if_empty(ref)
            case events.Free(ref):
                if ref in self._held:  # else it could not be opened
                    self._held[ref].run.close()
                self._forget_if_empty(ref)
            case _:
                raise AssertionError(command)

    def _spawn(self, operation: _Operation, command: events.Command) -> None:
        name = f"prefill {_name(command)}"
        self._tasks.spawn(self._run(operation, command), name=name)

    async def _run(self, operation: _Operation, command: events.Command) -> None:
        """Whatever happens, the operation ends with its event: nobody may hang."""
        try:
            ended = await operation()
        except Exception as error:  # noqa: BLE001 - as above
            ended = self._failed(command, error)
        if ended is not None:
            self._tell(ended)

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

    def _open(self, work: PrefillWork, ref: RequestRef, capacity: int) -> None:
        assert self._model is not None  # noqa: S101 - the machine waits for it
        space = SpaceId(work.tenant, self._model.facts, work.salt)
        keys = KeySpace(self._node.secret, space)
        self._held[ref] = _Held(work, keys, self._model.new_run(capacity))

    def _opened(self, ref: RequestRef) -> _Held:
        held = self._held.get(ref)
        if held is None:
            raise RunClosed("its run could not be made")
        return held

    def _forget_if_empty(self, ref: RequestRef) -> None:
        held = self._held.get(ref)
        if held is not None and held.run.closed and held.put is None:
            del self._held[ref]

    def _ended(self, message: PrefillDone | PrefillFailed) -> None:
        self._metrics.said(message)
        if isinstance(message, PrefillDone):
            log.info(
                "prefill done",
                request=message.request,
                attempt=message.attempt,
                reused=message.reused_tokens,
                computed=message.computed_tokens,
                queue_ms=round(message.times.queue_ms, 1),
                load_ms=round(message.times.load_ms, 1),
                compute_ms=round(message.times.compute_ms, 1),
            )
        else:
            log.warning(
                "prefill failed",
                request=message.request,
                attempt=message.attempt,
                code=message.code,
                reason=message.reason,
            )

    # ---- operations

    async def _load(self, load: events.Load) -> events.Event:
        held, clock = self._opened(load.ref), self._node.clock
        begin_s = clock.monotonic()
        outcomes = await self._pool.read_blocks(
            load.copies,
            held.space.tags,
            held.space.layout,
            [self._sink(held, load.first + i) for i in range(len(load.copies))],
            timeout_s=self._settings.load_timeout_s,
            purpose="reuse",
        )
        blocks = 0
        for outcome in outcomes:
            if not outcome.ok:
                log.info("reuse missed", request=load.ref.request, reason=outcome.miss)
                break
            blocks += 1
        size = blocks * held.space.layout.slot_bytes
        ms = (clock.monotonic() - begin_s) * 1000
        return events.Loaded(load.ref, blocks, size, ms)

    def _sink(self, held: _Held, block: int) -> PartSink:
        size = held.space.layout.block_tokens

        def part(number: int) -> memoryview:
            layer, kind = divmod(number, 2)
            return held.run.part(
                layer, 1 if kind else 0, block * size, (block + 1) * size
            )

        return part

    async def _begin(self, begin: events.Begin) -> events.Event:
        held, ref = self._opened(begin.ref), begin.ref
        lease = Lease(ref.request, ref.attempt, self._node.ref)
        try:
            put = await self._pool.begin(
                lease, held.space.tags, held.space.layout, begin.blocks
            )
        except PoolError as error:
            log.warning("no slots", request=ref.request, reason=str(error))
            return events.SlotsGranted(ref, ())
        if lease.owner == self._node.ref:
            held.put = put
        else:  # fenced meanwhile: they were the old life's
            await put.release()
        return events.SlotsGranted(ref, put.slots)

    async def _commit(self, ref: RequestRef) -> events.Event:
        put = self._opened(ref).put
        try:
            if put is not None:
                await put.commit()
        except PoolError as error:
            log.warning("blocks not stored", request=ref.request, reason=str(error))
        return events.Committed(ref)

    async def _run_step(self, step: events.Step) -> events.Event:
        model = self._model
        assert model is not None  # noqa: S101 - the machine waits for it
        chunks = [self._chunk(spec) for spec in step.chunks]
        layout = self._opened(step.chunks[0].ref).space.layout
        compute = StepCompute(chunks, layout, self._announcer(), self._node.count_step)
        self._step = compute
        clock = self._node.clock

        def call() -> float:
            started_s = clock.monotonic()
            compute.run(model.runner)
            return clock.monotonic() - started_s

        outcome, reason, seconds = events.StepOutcome.DONE, "", 0.0
        try:
            seconds = await self._engine.run(LANE, call)
        except StepCancelled:
            outcome = events.StepOutcome.ABORTED
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may hang
            outcome, reason = events.StepOutcome.FAILED, str(error)
            log.warning("step failed", reason=reason, error=type(error).__name__)
        finally:
            self._step = None
        self._metrics.stepped(seconds)
        return events.StepEnded(step.step, outcome, seconds * 1000, reason)

    def _chunk(self, spec: events.ChunkSpec) -> ChunkWork:
        held = self._opened(spec.ref)
        return ChunkWork(spec, held.work.tokens, held.run, held.put)

    def _announcer(self) -> Announce:
        loop = asyncio.get_running_loop()

        def announce(ref: RequestRef, parts: tuple[PartSums, ...]) -> None:
            loop.call_soon_threadsafe(self._tell, events.PartsWritten(ref, parts))

        return announce

    def _task_failed(self, error: BaseException) -> None:
        log.error("prefill task failed", exc_info=error)


def _name(command: events.Command) -> str:
    return type(command).__name__.lower()
