"""The decode role's thin shell on an engine that runs whole requests by itself."""

import asyncio
from contextlib import aclosing

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
from kvtide.decode.answering import pictures_of
from kvtide.decode.answering_machine import (
    AnswerFailed,
    AnsweringMachine,
    Command,
    Drew,
    Event,
    Generate,
    Stop,
)
from kvtide.decode.limits import DecodeLimits
from kvtide.decode.messages import HOPS, event_of
from kvtide.decode.metrics import DecodeMetrics
from kvtide.decode.prefill_asks import ask_prefill, tell_taken
from kvtide.decode.told import told
from kvtide.engine.errors import EngineError, UnsupportedOption
from kvtide.engine.serving import Ask, Served
from kvtide.kv import RequestRef, Role
from kvtide.worker.custody import refused
from kvtide.worker.request_service import RequestChassis, RequestService
from kvtide.worker.role_service import FIRST_STAGE

log = structlog.get_logger("kvtide.decode")


class AnsweringService(RequestService[Event, Command]):
    """The decode role of a worker whose engine is not ours."""

    _give_up_s = 0.0  # what is given up ends at once

    def __init__(
        self, chassis: RequestChassis, limits: DecodeLimits, *, drain_s: float
    ) -> None:
        """Nothing runs before ``start``."""
        self._machine = AnsweringMachine(chassis.node.ref, limits)
        self._metrics = DecodeMetrics(chassis.registry)
        super().__init__(
            chassis, Role.DECODE, HOPS, self._machine, self._metrics, drain_s=drain_s
        )
        self._running: dict[RequestRef, asyncio.Event] = {}

    def _loaded(self, served: Served) -> Event:
        facts = served.facts
        return events.ModelLoaded(
            facts.name,
            facts.max_tokens,
            facts.block_tokens,
            facts.layers,
            facts.eos_token_ids,
            served.kv_tokens,
            adapted=served.names,
            pictures=facts.pictures,
        )

    async def _drop_all(self) -> None:
        self._running.clear()

    def _reported(self, load: Load) -> None:
        if isinstance(load, DecodeLoad):
            self._metrics.load(load)

    def _event_of(self, message: AnyMessage) -> Event | None:
        event = event_of(message)
        ours = (
            events.WorkArrived,
            events.AckArrived,
            events.PullArrived,
            events.HandoverSaid,
        )
        return event if isinstance(event, ours) else None

    def _failed_end(self, command: Command, reason: str) -> Event | None:
        ended: Event | None = None
        match command:
            case Generate(ref):
                ended = AnswerFailed(ref, reason)
            case events.AskHandover(ref):
                ended = events.HandoverAnswered(ref, None)
            case events.TellTaken(ref):
                ended = events.TakenAnswered(ref, acked=False)
            case _:
                pass
        return ended

    def _hear(self, message: AnyMessage) -> Message | None:
        if isinstance(message, DecodeWork):
            try:
                self._engine.check(_asked(message))
            except UnsupportedOption as error:
                log.warning("work refused", request=message.request, reason=str(error))
                ref = RequestRef(message.request, message.attempt)
                return refused(ref, (RefuseCode.UNSUPPORTED, str(error)))
        return super()._hear(message)

    # ---- what goes out

    def _do(self, command: Command) -> None:
        match command:
            case events.ToGateway(_, message):
                if isinstance(message, Tokens | DecodeFailed):
                    told(message, self._metrics, self._spans)
            case Generate(ref, ask):
                self._running[ref] = asyncio.Event()
                self._spans.over(ref, FIRST_STAGE)
                self._spans.first((ref,), "first_step")
                self._spawn(self._generate, command, ask)
            case Stop(ref):
                stopped = self._running.pop(ref, None)
                if stopped is not None:
                    stopped.set()
            case events.AskHandover():
                self._spawn(ask_prefill, command, self._node, command)
            case events.TellTaken():
                self._spawn(tell_taken, command, self._node, command)
            case _:
                raise AssertionError(command)

    async def _generate(self, ask: Ask) -> Event | None:
        """Tell the machine of each piece; ends early when it is stopped."""
        stopped = self._running.get(ask.ref)
        if stopped is None:
            return None
        ending = asyncio.ensure_future(stopped.wait())
        try:
            async with aclosing(self._engine.answer(ask)) as pieces:
                while True:
                    coming = asyncio.ensure_future(anext(pieces, None))
                    await asyncio.wait((coming, ending), return_when="FIRST_COMPLETED")
                    if not coming.done():
                        coming.cancel()
                        await asyncio.wait((coming,))
                        return None
                    piece = coming.result()
                    if piece is None or stopped.is_set():
                        break
                    self._node.count_step()
                    self._spans.over(ask.ref, "first_step")
                    self._tell(Drew(ask.ref, piece))
        except UnsupportedOption as error:
            return AnswerFailed(ask.ref, str(error), RefuseCode.UNSUPPORTED)
        except EngineError as error:
            return AnswerFailed(ask.ref, str(error))
        finally:
            ending.cancel()
        if stopped.is_set():
            return None
        return AnswerFailed(ask.ref, "the engine's answer has no end")


def _asked(work: DecodeWork) -> Ask:
    """As much of it as says whether the engine can do it."""
    return Ask(
        ref=RequestRef(work.request, work.attempt),
        tokens=work.tokens,
        answered=len(work.tokens) - work.prompt_tokens,
        tenant=work.tenant,
        salt=work.salt,
        sampling=work.sampling,
        max_tokens=work.max_new_tokens,
        model=work.model,
        pictures=pictures_of(work),
    )
