"""The decode worker's thin shell: messages and results in, commands carried out."""

from collections.abc import Sequence

import structlog

from kvtide.bus.messages import (
    AnyMessage,
    DecodeFailed,
    DecodeLoad,
    DecodeWork,
    Load,
    Message,
    RefuseCode,
    Tokens,
)
from kvtide.decode import events
from kvtide.decode.batcher import DecodeMachine
from kvtide.decode.capacity import capacity_tokens
from kvtide.decode.compute import RowWork, step_part
from kvtide.decode.draws import Drawer, params_of
from kvtide.decode.ends import failed_end
from kvtide.decode.messages import HOPS, event_of
from kvtide.decode.metrics import DecodeMetrics
from kvtide.decode.operations import Operations
from kvtide.decode.prefill_asks import ask_prefill, tell_taken
from kvtide.decode.settings import DecodeSettings
from kvtide.decode.told import told
from kvtide.engine.errors import InvalidSampling, RunClosed
from kvtide.engine.loading import LoadedModel
from kvtide.kv import RequestRef, Role
from kvtide.worker.custody import refused
from kvtide.worker.events import CommonEvent
from kvtide.worker.service import FIRST_STAGE, Chassis, OpenRun, WorkerService

LANE = "decode"

log = structlog.get_logger("kvtide.decode")


class DecodeService(WorkerService[events.Event, events.Command]):
    """The decode role of a worker."""

    _give_up_s = 0.0  # what is given up ends at once, or with the tasks
    _caused = (events.ReadParts,)

    def __init__(self, chassis: Chassis, settings: DecodeSettings) -> None:
        """Nothing runs before ``start``."""
        self._machine = DecodeMachine(chassis.node.ref, settings.limits(), self._space)
        self._metrics = DecodeMetrics(chassis.registry)
        super().__init__(
            chassis,
            Role.DECODE,
            HOPS,
            self._machine,
            self._metrics,
            drain_s=settings.drain_s,
        )
        self._settings = settings
        self._operations = Operations(chassis, settings, self._metrics)
        self._drawer = Drawer()
        self._held: dict[RequestRef, OpenRun] = {}

    def _loaded(self, model: LoadedModel) -> events.Event:
        facts = model.facts
        return events.ModelLoaded(
            facts.name,
            facts.max_tokens,
            facts.block_tokens,
            facts.layers,
            facts.eos_token_ids,
            capacity_tokens(self._settings, facts, model.kv_tokens),
        )

    async def _drop_all(self) -> None:
        for held in self._held.values():
            held.run.close()
        self._held.clear()

    def _reported(self, load: Load) -> None:
        if isinstance(load, DecodeLoad):
            self._metrics.load(load)

    def _event_of(self, message: AnyMessage) -> events.Event | None:
        return event_of(message)

    def _failed_end(self, command: events.Command, reason: str) -> events.Event | None:
        return failed_end(command, reason)

    def _hear(self, message: AnyMessage) -> Message | None:
        if isinstance(message, DecodeWork):
            try:
                params_of(message.sampling)
            except InvalidSampling as error:
                ref = RequestRef(message.request, message.attempt)
                return refused(ref, (RefuseCode.UNSUPPORTED, str(error)))
        return super()._hear(message)

    # ---- what goes out

    def _tell(self, event: events.Event | CommonEvent) -> Message | None:
        reply = super()._tell(event)
        if not self._closed:
            running = self._machine.running
            self._engine.claim(LANE, wanted=running is not None)
            self._steps.runs(self._role, running)
        return reply

    def _do(self, command: events.Command) -> None:
        match command:
            case events.ToGateway(_, message):
                if isinstance(message, Tokens | DecodeFailed):
                    told(message, self._metrics, self._spans)
            case events.AskHandover():
                self._spawn(ask_prefill, command, self._node, command)
            case events.TellTaken():
                self._spawn(tell_taken, command, self._node, command)
            case events.Step():
                self._spawn(self._run_step, command, command)
            case _:
                self._do_for_run(command)

    def _do_for_run(self, command: events.Command) -> None:
        operations = self._operations
        match command:
            case events.Open(work, ref, capacity):
                run = self._loaded_model.new_run(capacity)
                self._held[ref] = OpenRun(self._space(work), run)
            case events.FindCopies(ref):
                held = self._opened(ref)
                self._spawn(operations.find_copies, command, held, command)
            case events.ReadCopies(ref):
                held = self._opened(ref)
                self._spawn(operations.read_copies, command, held, command)
            case events.ReadParts(ref):
                held = self._opened(ref)
                self._spawn(operations.read_parts, command, held, command)
            case events.PutBlocks(ref):
                held = self._opened(ref)
                self._spawn(operations.put_blocks, command, held, command)
            case events.Free(ref):
                self._spans.ended(ref, "let go")
                held = self._held.pop(ref, None)
                if held is not None:  # else it could not be opened
                    held.run.close()
            case _:
                raise AssertionError(command)

    def _opened(self, ref: RequestRef) -> OpenRun:
        held = self._held.get(ref)
        if held is None:
            raise RunClosed("its run could not be made")
        return held

    def _first_steps(self, step: events.Step) -> Sequence[RequestRef]:
        """The traced requests that are in a step for the first time."""
        if not self._spans:
            return ()
        refs = [row.ref for row in step.rows]
        for ref in refs:
            self._spans.over(ref, FIRST_STAGE)
        return self._spans.first(refs, "first_step")

    async def _run_step(self, step: events.Step) -> events.Event:
        model = self._loaded_model
        rows = [
            RowWork(row, self._held[row.ref].run)
            for row in step.rows
            if row.ref in self._held  # else it could not be opened, and has failed
        ]
        part = step_part(self._drawer, rows, model.grammars)
        firsts = self._first_steps(step)
        try:
            stepped = await self._steps.step(self._role, model.runner, part)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may hang
            log.warning("step failed", reason=str(error), error=type(error).__name__)
            failed = events.StepOutcome.FAILED
            return events.StepEnded(step.step, failed, 0.0, reason=str(error))
        finally:
            for ref in firsts:
                self._spans.over(ref, "first_step")
        self._node.count_step()
        self._metrics.stepped(stepped.ms / 1000)
        sampled, broken = stepped.result
        return events.StepEnded(
            step.step,
            events.StepOutcome.DONE,
            stepped.ms,
            sampled,
            failed=broken,
            whole=stepped.whole,
        )
