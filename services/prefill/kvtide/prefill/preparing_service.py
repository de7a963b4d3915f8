"""The prefill role's thin shell on an engine that runs whole requests by itself."""

import asyncio

import structlog

from kvtide.bus import Hop
from kvtide.bus.messages import (
    AnyMessage,
    BlocksMade,
    BlocksMaking,
    Load,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    RefuseCode,
)
from kvtide.engine.errors import EngineError
from kvtide.engine.serving import Ask, Served
from kvtide.kv import RequestRef, Role
from kvtide.prefill import events
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.messages import HOPS, event_of
from kvtide.prefill.metrics import PrefillMetrics
from kvtide.prefill.preparing import (
    Command,
    Event,
    Prepare,
    Prepared,
    PrepareFailed,
    PreparingMachine,
    Stop,
)
from kvtide.prefill.told import told
from kvtide.worker.request_service import RequestChassis, RequestService

log = structlog.get_logger("kvtide.prefill")


class PreparingService(RequestService[Event, Command]):
    """The prefill role of a worker whose engine is not ours."""

    def __init__(
        self, chassis: RequestChassis, limits: PrefillLimits, *, drain_s: float
    ) -> None:
        """Nothing runs before ``start``."""
        self._machine = PreparingMachine(chassis.node.ref, limits)
        self._metrics = PrefillMetrics(chassis.registry)
        super().__init__(
            chassis, Role.PREFILL, HOPS, self._machine, self._metrics, drain_s=drain_s
        )
        self._running: dict[RequestRef, asyncio.Event] = {}

    def _loaded(self, served: Served) -> Event:
        facts = served.facts
        return events.ModelLoaded(
            facts.name, facts.max_tokens, facts.block_tokens, adapted=served.names
        )

    async def _drop_all(self) -> None:
        self._running.clear()

    def _reported(self, load: Load) -> None:
        if isinstance(load, PrefillLoad):
            self._metrics.load(load)

    def _hear(self, message: AnyMessage) -> Message | None:
        # what peers make is theirs: the pool is looked up by the engine itself
        if isinstance(message, BlocksMaking | BlocksMade):
            return None
        return super()._hear(message)

    def _event_of(self, message: AnyMessage) -> Event | None:
        event = event_of(message)
        ours = (events.WorkArrived, events.PullArrived, events.TakenArrived)
        return event if isinstance(event, ours) else None

    def _failed_end(self, command: Command, reason: str) -> Event | None:
        if isinstance(command, Prepare):
            return PrepareFailed(command.ref, reason)
        return None

    def _do(self, command: Command) -> None:
        match command:
            case events.ToGateway(_, message):
                if isinstance(message, PrefillDone | PrefillFailed):
                    told(message, self._metrics, self._spans)
            case events.ToDecode(decode, message):
                self._to(Role.DECODE, decode, Hop.HANDOVER, message)
            case Prepare(ref, ask):
                self._running[ref] = asyncio.Event()
                self._spawn(self._prepare, command, ask)
            case Stop(ref):
                self._spans.ended(ref)
                stopped = self._running.pop(ref, None)
                if stopped is not None:
                    stopped.set()
            case _:
                raise AssertionError(command)

    async def _prepare(self, ask: Ask) -> Event | None:
        stopped = self._running.get(ask.ref)
        if stopped is None:
            return None
        if not self._pool.ready:
            # what is computed here would go nowhere
            reason = "no store on this host takes blocks"
            return PrepareFailed(ask.ref, reason, RefuseCode.NO_STORE)
        ending = asyncio.ensure_future(stopped.wait())
        preparing = asyncio.ensure_future(self._engine.prepare(ask))
        try:
            await asyncio.wait((preparing, ending), return_when="FIRST_COMPLETED")
            if not preparing.done():
                return None
            self._node.count_step()
            return Prepared(ask.ref, preparing.result())
        except EngineError as error:
            return PrepareFailed(ask.ref, str(error))
        finally:
            ending.cancel()
            if not preparing.done():
                preparing.cancel()
                await asyncio.wait((preparing,))
