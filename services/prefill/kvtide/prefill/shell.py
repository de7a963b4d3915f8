"""The prefill worker's thin shell: messages and results in, commands carried out."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from kvtide.bus import Hop
from kvtide.bus.messages import (
    AnyMessage,
    Load,
    Message,
    PartSums,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillWork,
)
from kvtide.engine.errors import RunClosed, StepCancelled
from kvtide.engine.loading import LoadedModel
from kvtide.kv import Lease, NodeRef, RequestRef, Role
from kvtide.pool import PoolError, Put
from kvtide.prefill import events
from kvtide.prefill.compute import Announce, ChunkWork, StepCompute
from kvtide.prefill.ends import failed_end
from kvtide.prefill.errors import LoadFellShort
from kvtide.prefill.gate import LoadGate
from kvtide.prefill.layered_load import LayeredLoad
from kvtide.prefill.messages import HOPS, event_of
from kvtide.prefill.metrics import PrefillMetrics
from kvtide.prefill.queue import PrefillMachine
from kvtide.prefill.settings import PrefillSettings
from kvtide.prefill.told import told
from kvtide.worker.mixing import STEP_LANE
from kvtide.worker.service import FIRST_STAGE, Chassis, OpenRun, WorkerService

log = structlog.get_logger("kvtide.prefill")


@dataclass(slots=True)
class _Held(OpenRun):
    """What the shell keeps for a job that is open."""

    work: PrefillWork
    put: Put | None = None
    gates: dict[int, LoadGate] = field(default_factory=dict[int, LoadGate])
    written: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])


class PrefillService(WorkerService[events.Event, events.Command]):
    """The prefill role of a worker."""

    def __init__(self, chassis: Chassis, settings: PrefillSettings) -> None:
        """Nothing runs before ``start``."""
        machine = PrefillMachine(chassis.node.ref, settings.limits())
        self._metrics = PrefillMetrics(chassis.registry)
        super().__init__(
            chassis,
            Role.PREFILL,
            HOPS,
            machine,
            self._metrics,
            drain_s=settings.drain_s,
        )
        self._settings = settings
        self._held: dict[RequestRef, _Held] = {}
        self._step: StepCompute | None = None
        self._shared = events.EngineShared(shared=False)

    def _loaded(self, model: LoadedModel) -> events.Event:
        facts = model.facts
        return events.ModelLoaded(facts.name, facts.max_tokens, facts.block_tokens)

    async def _drop_all(self) -> None:
        for held in self._held.values():
            held.run.close()
            if held.put is not None:
                await held.put.release()
        self._held.clear()

    def _reported(self, load: Load) -> None:
        if isinstance(load, PrefillLoad):
            self._metrics.load(load)

    def _event_of(self, message: AnyMessage) -> events.Event | None:
        return event_of(message)

    def _failed_end(self, command: events.Command, reason: str) -> events.Event | None:
        return failed_end(command, reason)

    def _fenced(self, me: NodeRef) -> None:
        for held in self._held.values():
            held.put = None  # the pool's client has dropped it
        super()._fenced(me)

    # ---- what goes out

    def _tell(self, event: events.Event) -> Message | None:
        beside = self._steps.beside(self._role)
        shared = events.EngineShared(
            self._engine.contended(STEP_LANE), beside.target_ms, beside.shape
        )
        if shared != self._shared:
            self._shared = shared
            super()._tell(shared)
        return super()._tell(event)

    def _do(self, command: events.Command) -> None:
        match command:
            case events.ToDecode(decode, message):
                self._to(Role.DECODE, decode, Hop.HANDOVER, message)
            case events.ToGateway(_, message):
                if isinstance(message, PrefillDone | PrefillFailed):
                    told(message, self._metrics, self._spans)
            case events.Step():
                self._spawn(self._run_step, command, command)
            case events.Abort():
                if self._step is not None:
                    self._step.abort()
            case _:
                self._do_for_job(command)

    def _do_for_job(self, command: events.Command) -> None:
        match command:
            case events.Open(work, ref, capacity):
                run = self._loaded_model.new_run(capacity)
                self._held[ref] = _Held(self._space(work), run, work)
            case events.Load(ref, _, first):
                held = self._opened(ref)
                gate = LoadGate(self._settings.load_timeout_s)
                held.gates[first] = gate
                self._spawn(self._load, command, held, command, gate)
            case events.Begin():
                self._spawn(self._begin, command, command)
            case events.Commit(ref):
                self._spawn(self._commit, command, ref)
            case events.Release(ref):
                held = self._held.get(ref)
                if held is not None and held.put is not None:
                    self._spawn(_release, command, held.put)
                    held.put = None
                self._forget_if_empty(ref)
            case events.Free(ref):
                self._spans.ended(ref, "let go")
                if ref in self._held:  # else it could not be opened
                    self._held[ref].run.close()
                self._forget_if_empty(ref)
            case _:
                raise AssertionError(command)

    def _opened(self, ref: RequestRef) -> _Held:
        held = self._held.get(ref)
        if held is None:
            raise RunClosed("its run could not be made")
        return held

    def _forget_if_empty(self, ref: RequestRef) -> None:
        held = self._held.get(ref)
        if held is not None and held.run.closed and held.put is None:
            del self._held[ref]

    # ---- operations

    async def _load(
        self, held: _Held, load: events.Load, gate: LoadGate
    ) -> events.Event:
        loading = LayeredLoad(self._pool, held, load, gate, self._node.clock)
        try:
            return await loading.run(
                timeout_s=self._settings.load_timeout_s, checked=self._tell
            )
        finally:
            gate.ended(whole=False)  # says nothing if all has come
            held.gates.pop(load.first, None)

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
        if put is None:
            return events.Committed(ref)
        before = len(put.stored)
        try:
            await put.commit()
        except PoolError as error:
            log.warning("blocks not stored", request=ref.request, reason=str(error))
        return events.Committed(ref, put.stored[before:])

    async def _run_step(self, step: events.Step) -> events.Event:
        chunks = [self._chunk(spec) for spec in step.chunks]
        with self._traced(step):
            return await self._compute(step, chunks)

    async def _compute(
        self, step: events.Step, chunks: Sequence[ChunkWork]
    ) -> events.Event:
        self._step = compute = StepCompute(
            chunks,
            self._opened(step.chunks[0].ref).space.layout,
            self._announcer(),
            self._node.count_step,
            lambda: self._engine.contended(STEP_LANE),
        )
        runner = self._loaded_model.runner
        try:
            stepped = await self._steps.step(self._role, runner, compute.part())
        except (StepCancelled, LoadFellShort):
            return events.StepEnded(step.step, events.StepOutcome.ABORTED, 0.0)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may hang
            reason = str(error)
            log.warning("step failed", reason=reason, error=type(error).__name__)
            return events.StepEnded(step.step, events.StepOutcome.FAILED, 0.0, reason)
        finally:
            self._step = None
        self._metrics.stepped(stepped.ms / 1000)
        done = events.StepOutcome.DONE
        return events.StepEnded(step.step, done, stepped.ms, whole=stepped.whole)

    @contextmanager
    def _traced(self, step: events.Step) -> Generator[None]:
        for chunk in step.chunks:
            self._spans.over(chunk.ref, FIRST_STAGE)
            self._spans.began(chunk.ref, "chunk", start=chunk.start, end=chunk.end)
        try:
            yield
        finally:
            for chunk in step.chunks:
                self._spans.over(chunk.ref, "chunk")

    def _chunk(self, spec: events.ChunkSpec) -> ChunkWork:
        held = self._opened(spec.ref)
        gates = tuple(held.gates.values())
        return ChunkWork(
            spec, held.work.tokens, held.run, held.put, gates, held.written
        )

    def _announcer(self) -> Announce:
        loop = asyncio.get_running_loop()

        def announce(ref: RequestRef, parts: tuple[PartSums, ...]) -> None:
            loop.call_soon_threadsafe(self._tell, events.PartsWritten(ref, parts))

        return announce


async def _release(put: Put) -> None:
    await put.release()
