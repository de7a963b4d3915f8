"""The decode role on an engine that runs whole requests: who is asked, what is said. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from kvtide.bus.messages import (
    Ack,
    DecodeLoad,
    DecodeWork,
    RefuseCode,
    TokenAck,
    TokenPage,
    TokenPull,
    WorkAccepted,
    WorkRefused,
)
from kvtide.bus.ownership import Ownership, Standing
from kvtide.decode import events
from kvtide.decode.answering import Answering, Phase, tightest_tbt_ms
from kvtide.decode.farewell import Farewells
from kvtide.decode.handover import EarlyWords, Said
from kvtide.decode.intake import unfit
from kvtide.decode.limits import DecodeLimits
from kvtide.engine.serving import Ask, Piece
from kvtide.kv import NodeRef, RequestRef
from kvtide.worker.custody import (
    TOO_LATE,
    Readiness,
    Refusal,
    refused,
    released,
    unknown_page,
)
from kvtide.worker.events import OwnerSaid, Reply


@dataclass(frozen=True, slots=True)
class Drew:
    """The engine has drawn some tokens."""

    ref: RequestRef
    piece: Piece


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """The engine ends without an answer. ``code`` is for machines."""

    ref: RequestRef
    reason: str
    code: str = "engine"


@dataclass(frozen=True, slots=True)
class Generate:
    """Ask the engine → ``Drew`` …, or ``AnswerFailed``; ``Stop`` may end it early."""

    ref: RequestRef
    ask: Ask


@dataclass(frozen=True, slots=True)
class Stop:
    """End a ``Generate`` if it runs; nothing is heard of it any more."""

    ref: RequestRef


Heard = (
    events.WorkArrived
    | OwnerSaid
    | events.AckArrived
    | events.PullArrived
    | events.HandoverSaid
)
Progressed = Drew | AnswerFailed | events.HandoverAnswered | events.TakenAnswered
Turned = (
    events.ModelLoaded
    | events.StoreAttached
    | events.Drain
    | events.Resume
    | events.GiveUp
    | events.Fenced
    | events.Tick
)
Event = Heard | Progressed | events.OpenFailed | Turned
Command = (
    Reply | events.ToGateway | events.AskHandover | events.TellTaken | Generate | Stop
)


class AnsweringMachine:
    """Each accepted request ends once: finished, failed, or let go unsaid.

    The engine batches by itself: what is taken is asked for at once, or as soon as
    another worker's prefill has ended.
    """

    def __init__(self, me: NodeRef, limits: DecodeLimits) -> None:
        """``me`` is this worker's life."""
        self._me = me
        self._limits = limits
        self._model: events.ModelLoaded | None = None
        self._readiness = Readiness()
        self._owners = Ownership()
        self._early = EarlyWords(limits)
        self._farewells = Farewells(limits)
        self._requests: dict[RequestRef, Answering] = {}
        self._step_ms = limits.initial_step_ms
        self._now_s = 0.0
        self._out: list[Command] = []

    @property
    def idle(self) -> bool:
        """Nobody waits, runs, or has tokens that were not acknowledged."""
        return not self._requests

    def load(self) -> DecodeLoad:
        """What the conductor is told."""
        live = self._live()
        running = [one for one in live if one.phase is Phase.RUNNING]
        used = sum(one.tokens for one in running)
        return DecodeLoad(
            waiting=len(live) - len(running),
            running=len(running),
            kv_tokens_used=used,
            kv_tokens_promised=sum(one.tokens for one in live) - used,
            kv_tokens_capacity=self._model.capacity_tokens if self._model else 0,
            step_ms=self._step_ms,
            tbt_ms=tightest_tbt_ms(live),
        )

    def handle(self, event: Event, now_s: float) -> Sequence[Command]:
        """Take one event; the commands are to be carried out in order."""
        self._now_s = now_s
        self._out = []
        match event:
            case (
                events.WorkArrived()
                | events.CancelArrived()
                | events.OwnedArrived()
                | events.MemberGone()
                | events.AckArrived()
                | events.PullArrived()
                | events.HandoverSaid()
            ):
                self._heard(event)
            case (
                Drew()
                | AnswerFailed()
                | events.HandoverAnswered()
                | events.TakenAnswered()
            ):
                self._progressed(event)
            case events.OpenFailed():
                pass  # nothing is opened here
            case _:
                self._turned(event)
        return self._out

    # what others say

    def _heard(self, event: Heard) -> None:
        match event:
            case events.WorkArrived(work):
                self._out.append(Reply(self._work(work)))
            case events.CancelArrived() | events.OwnedArrived() | events.MemberGone():
                self._owner_said(event)
            case events.AckArrived(ack):
                self._ack(ack)
            case events.PullArrived(pull):
                self._out.append(Reply(self._page(pull)))
            case events.HandoverSaid(said):
                self._said(said)
            case _:
                assert_never(event)

    def _owner_said(self, event: OwnerSaid) -> None:
        for ref in released(self._owners, event, self._now_s):
            self._cancel(ref)
        if isinstance(event, events.CancelArrived):
            self._out.append(Reply(Ack()))
        elif isinstance(event, events.MemberGone):
            self._farewells.gone(event.node)
            for one in self._waiting():
                one.prefilling.gone(event.node)
                self._begin(one)

    def _work(self, work: DecodeWork) -> WorkAccepted | WorkRefused:
        ref = RequestRef(work.request, work.attempt)
        standing = self._owners.judge(ref, work.gateway, self._now_s)
        if standing is not Standing.HELD:
            taken = TOO_LATE.get(standing) or self._take(work)
            if not isinstance(taken, Answering):
                return refused(ref, taken)
            older = self._owners.held(ref.request)
            if older is not None:
                self._cancel(older)
            self._owners.hold(ref, work.gateway)
            self._requests[ref] = taken
            for said in self._early.take(ref):
                taken.prefilling.hear(said, self._now_s)
            self._begin(taken)
        return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=0.0)

    def _take(self, work: DecodeWork) -> Answering | Refusal:
        refusal = unfit(work, self._readiness, self._me)
        model = self._model
        if refusal is not None or model is None:
            return refusal or TOO_LATE[Standing.STALE]
        one = Answering.of(work, model, self._me, self._now_s)
        if one.most_tokens > model.capacity_tokens:
            reason = f"the engine's memory holds {model.capacity_tokens} tokens"
            return RefuseCode.TOO_LARGE, reason
        if len(self._requests) >= self._limits.batch + self._limits.waiting:
            return RefuseCode.BUSY, "the queue is full"
        # the engine may hold them until the answer's end
        held = sum(other.picture_bytes for other in self._live())
        if one.picture_bytes and held + one.picture_bytes > self._limits.picture_bytes:
            return RefuseCode.BUSY, f"pictures of open requests take {held} bytes"
        return one

    def _ack(self, ack: TokenAck) -> None:
        one = self._requests.get(RequestRef(ack.request, ack.attempt))
        if one is None:
            return
        one.answer.ack(ack.index, finished=ack.finished)
        if one.phase is Phase.ENDED and (one.answer.finish_acked or ack.finished):
            self._forget(one)

    def _page(self, pull: TokenPull) -> TokenPage:
        one = self._requests.get(RequestRef(pull.request, pull.attempt))
        return unknown_page(pull) if one is None else one.page(pull)

    def _said(self, said: Said) -> None:
        one = self._requests.get(RequestRef(said.request, said.attempt))
        if one is None:
            self._early.keep(said, self._now_s)
            return
        one.prefilling.hear(said, self._now_s)
        self._begin(one)

    # what the shell reports

    def _progressed(self, event: Progressed) -> None:
        if isinstance(event, events.TakenAnswered):
            self._farewells.answered(event.ref, acked=event.acked, now_s=self._now_s)
            return
        one = self._requests.get(event.ref)
        if one is None or one.phase is Phase.ENDED:
            return
        match event:
            case Drew(_, piece):
                self._drew(one, piece)
            case AnswerFailed(_, reason, code):
                self._fail(one, code, reason)
            case events.HandoverAnswered(_, state):
                one.prefilling.answered(state, self._now_s, self._limits)
                self._begin(one)
            case _:
                assert_never(event)

    def _drew(self, one: Answering, piece: Piece) -> None:
        gateway = one.work.gateway
        first, before_s = one.phase is not Phase.RUNNING, one.last_s
        words = one.drew(piece, self._me, self._now_s)
        if not first and piece.ids:
            took_ms = (self._now_s - before_s) * 1000 / len(piece.ids)
            self._step_ms += (took_ms - self._step_ms) / 8
        if first and one.work.prefill is not None:
            if one.work.prefill == self._me:
                done = one.prefilled(self._me, self._now_s)
                self._out.append(events.ToGateway(gateway, done))
            self._out.append(self._farewells.say(one.ref, one.work.prefill))
        self._out.append(events.ToGateway(gateway, words))
        if one.answer.finish is not None:
            self._end(one)
        elif piece.ended:
            self._fail(one, "engine", "the engine ended the answer too early")

    def _begin(self, one: Answering) -> None:
        """Ask the engine, once nothing more is to be waited for."""
        if one.phase is not Phase.WAITING or not one.prefilling.over:
            return
        if one.answer.finish is None:
            self._out.append(Generate(one.ref, one.ask(self._now_s)))
            return
        count = one.answer.count
        words = one.words(count, self._me, first=True, now_s=self._now_s)
        self._out.append(events.ToGateway(one.work.gateway, words))
        self._end(one)

    def _live(self) -> list[Answering]:
        return [one for one in self._requests.values() if one.phase is not Phase.ENDED]

    def _waiting(self) -> list[Answering]:
        return [one for one in self._requests.values() if one.phase is Phase.WAITING]

    # what turns the worker as a whole

    def _turned(self, event: Turned) -> None:
        match event:
            case events.ModelLoaded():
                self._model = event
                self._readiness = replace(self._readiness, model=event)
            case events.StoreAttached() | events.Drain() | events.Resume():
                self._readiness = self._readiness.turned(event)
            case events.GiveUp():
                self._give_up()
            case events.Fenced(me):
                self._fenced(me)
            case events.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _give_up(self) -> None:
        for one in self._requests.values():
            if one.phase is not Phase.ENDED:
                self._fail(one, "draining", "the worker ends")

    def _fenced(self, me: NodeRef) -> None:
        self._me = me
        self._early.clear()
        self._farewells.clear()
        self._owners.fenced(self._now_s)
        for one in list(self._requests.values()):
            self._drop(one)

    def _tick(self) -> None:
        self._early.expire(self._now_s)
        for ref in self._owners.expire(self._now_s):
            self._cancel(ref)
        for one in list(self._requests.values()):
            if one.phase is Phase.ENDED:
                if self._now_s - one.ended_s > self._limits.ended_kept_s:
                    self._forget(one)
            elif one.phase is not Phase.RUNNING and self._now_s > one.deadline_s:
                self._fail(one, "deadline", "no token in time")
            elif one.phase is Phase.WAITING:
                self._ask_prefill(one)
        self._out.extend(self._farewells.due(self._now_s))

    def _ask_prefill(self, one: Answering) -> None:
        prefill = one.prefilling.prefill
        if prefill is not None and one.prefilling.ask(self._now_s, self._limits):
            self._out.append(events.AskHandover(one.ref, prefill))

    # ends

    def _fail(self, one: Answering, code: str, reason: str) -> None:
        failed = one.fail(self._me, code, reason)
        self._out.append(events.ToGateway(one.work.gateway, failed))
        self._end(one)

    def _end(self, one: Answering) -> None:
        if one.phase is not Phase.WAITING:
            self._out.append(Stop(one.ref))
        one.phase, one.ended_s = Phase.ENDED, self._now_s

    def _forget(self, one: Answering) -> None:
        """It has ended, and nobody will ask for it again."""
        self._owners.drop(one.ref, self._now_s)
        self._requests.pop(one.ref, None)

    def _cancel(self, ref: RequestRef) -> None:
        """Its owner wants it no more: let it go without a word."""
        self._owners.drop(ref, self._now_s, cancelled=True)
        one = self._requests.get(ref)
        if one is not None:
            self._drop(one)

    def _drop(self, one: Answering) -> None:
        if one.phase is not Phase.ENDED:
            self._end(one)
        self._requests.pop(one.ref, None)
