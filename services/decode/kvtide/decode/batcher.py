"""The decode worker's batch: who has memory, who runs, what is said. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from kvtide.bus.messages import (
    Ack,
    DecodeLoad,
    DecodeWork,
    TokenAck,
    TokenPage,
    TokenPull,
    WorkAccepted,
    WorkRefused,
)
from kvtide.bus.ownership import Standing
from kvtide.decode import events
from kvtide.decode.events import Command, Event, Heard, Progressed, Turned
from kvtide.decode.farewell import Farewells
from kvtide.decode.handover import EarlyWords, Said
from kvtide.decode.holdings import Holdings
from kvtide.decode.intake import (
    crowded,
    fill_tokens,
    next_rows,
    predicted_start_ms,
    tightest_tbt_ms,
    unfit,
)
from kvtide.decode.limits import DecodeLimits
from kvtide.decode.pages import PageLedger
from kvtide.decode.sequence import BlockKeys, Phase, Sequence
from kvtide.kv import NodeRef, RequestRef
from kvtide.worker.custody import (
    TOO_LATE,
    Readiness,
    Refusal,
    refused,
    released,
    unknown_page,
)
from kvtide.worker.events import OwnerSaid
from kvtide.worker.steps import Busy, Running, StepCost


class DecodeMachine:
    """Continuous batching. Each accepted request ends once: finished, failed, or let go.

    Pages are bound, first come first served, before anything is pulled, and more as
    tokens come; when none are left the youngest begins again later. ``Free`` gives them
    back, exactly once, and never while the shell uses the run.
    """

    def __init__(
        self,
        me: NodeRef,
        limits: DecodeLimits,
        keys: Callable[[DecodeWork], BlockKeys],
    ) -> None:
        """``me`` is this worker's life; ``keys`` makes a request's key space."""
        self._me = me
        self._limits = limits
        self._keys = keys
        self._model: events.ModelLoaded | None = None
        self._readiness = Readiness()
        self._held = Holdings(limits)
        self._early = EarlyWords(limits)
        self._farewells = Farewells(limits)
        self._step: events.Step | None = None
        self._steps = 0
        self._step_ms = limits.initial_step_ms
        self._cost = StepCost(limits.initial_step_ms, limits.initial_step_ms / 20)
        self._busy = Busy()
        self._now_s = 0.0
        self._out: list[Command] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take one event; the commands are to be carried out in order."""
        self._now_s = self._held.now_s = now_s
        self._out = self._held.out = []
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
                events.HandoverAnswered()
                | events.TakenAnswered()
                | events.CopiesFound()
                | events.CopiesRead()
                | events.PartsRead()
                | events.StepEnded()
                | events.BlocksPut()
            ):
                self._progressed(event)
            case events.OpenFailed(ref, reason):
                one = self._held.get(ref)
                if one is not None and one.phase is not Phase.ENDED:
                    self._fail(one, "no_memory", reason)
            case _:
                self._turned(event)
        self._schedule()
        return self._out

    @property
    def idle(self) -> bool:
        """Nobody waits, runs, or has tokens that were not acknowledged."""
        return len(self._held) == 0

    @property
    def running(self) -> Running | None:
        """What the step that is under way has: then another will follow, mostly."""
        if self._step is None:
            return None
        return Running(self._step.shape, tightest_tbt_ms(self._held.all()))

    @property
    def pages(self) -> PageLedger:
        """The memory's book."""
        return self._held.pages

    @property
    def requests(self) -> int:
        """Requests that are known, ended ones that are not acknowledged included."""
        return len(self._held)

    def load(self) -> DecodeLoad:
        """What the conductor is told.

        ``running`` are those that the engine works for, so that a counter of steps
        which stands still while there are some means that the engine hangs.
        """
        size = self._model.block_tokens if self._model else 1
        waiting = self._held.in_phase(Phase.WAITING)
        everyone = self._held.all()
        running = len(next_rows(everyone, self._limits))
        promised = sum(one.first_pages(self._limits) for one in waiting)
        between = (Phase.PULLING, Phase.PREEMPTED)
        return DecodeLoad(
            waiting=len(waiting) + sum(one.phase in between for one in everyone),
            running=running,
            kv_tokens_used=self._held.pages.used * size,
            kv_tokens_promised=promised * size,
            kv_tokens_capacity=self._held.pages.capacity * size,
            step_ms=self._step_ms,
            tbt_ms=tightest_tbt_ms(everyone),
            preempted=self._held.preempted,
            step=self._cost.last,
            busy_share=self._busy.share,
            bound=self._cost.bound,
            fill_tokens=fill_tokens(everyone),
        )

    # what others say

    def _heard(self, event: Heard) -> None:
        match event:
            case events.WorkArrived(work):
                self._out.append(events.Reply(self._work(work)))
            case events.CancelArrived() | events.OwnedArrived() | events.MemberGone():
                self._owner_said(event)
            case events.AckArrived(ack):
                self._ack(ack)
            case events.PullArrived(pull):
                self._out.append(events.Reply(self._page(pull)))
            case events.HandoverSaid(said):
                self._said(said)
            case _:
                assert_never(event)

    def _owner_said(self, event: OwnerSaid) -> None:
        for ref in released(self._held.owners, event, self._now_s):
            self._held.cancel(ref)
        if isinstance(event, events.CancelArrived):
            self._out.append(events.Reply(Ack()))
        elif isinstance(event, events.MemberGone):
            self._prefill_gone(event.node)

    def _work(self, work: DecodeWork) -> WorkAccepted | WorkRefused:
        ref = RequestRef(work.request, work.attempt)
        standing = self._held.owners.judge(ref, work.gateway, self._now_s)
        if standing is Standing.HELD:
            return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=0.0)
        taken = TOO_LATE.get(standing) or self._take(work)
        if not isinstance(taken, Sequence):
            return refused(ref, taken)
        others = self._held.all()
        start_ms = predicted_start_ms(
            taken, others, self._held.pages, self._limits, self._cost
        )
        self._held.take(taken, work.gateway)
        for said in self._early.take(ref):
            taken.handover.hear(said, self._now_s)
        return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=start_ms)

    def _take(self, work: DecodeWork) -> Sequence | Refusal:
        refusal = unfit(work, self._readiness, self._me)
        model = self._model
        if refusal is not None or model is None:
            return refusal or TOO_LATE[Standing.STALE]
        taken = Sequence.of(work, self._keys(work), model, self._limits, self._now_s)
        others = self._held.all()
        return (
            crowded(taken, others, self._held.pages, self._limits, self._cost) or taken
        )

    def _prefill_gone(self, node: NodeRef) -> None:
        for one in self._held.all():
            if one.handover.gone(node):
                self._pull(one)
        self._farewells.gone(node)

    def _ack(self, ack: TokenAck) -> None:
        one = self._held.known(RequestRef(ack.request, ack.attempt))
        if one is None:
            return
        one.answer.ack(ack.index, finished=ack.finished)
        if one.phase is Phase.ENDED and (one.answer.finish_acked or ack.finished):
            self._held.acknowledged(one)

    def _page(self, pull: TokenPull) -> TokenPage:
        one = self._held.known(RequestRef(pull.request, pull.attempt))
        return unknown_page(pull) if one is None else one.page(pull)

    def _said(self, said: Said) -> None:
        one = self._held.get(RequestRef(said.request, said.attempt))
        if one is None:
            self._early.keep(said, self._now_s)
            return
        one.handover.hear(said, self._now_s)
        self._pull(one)

    # what the shell reports

    def _progressed(self, event: Progressed) -> None:
        match event:
            case events.StepEnded():
                self._step_ended(event)
            case events.TakenAnswered(ref, acked):
                self._farewells.answered(ref, acked=acked, now_s=self._now_s)
            case _:
                one = self._held.get(event.ref)
                if one is not None:
                    self._operation_ended(one, event)

    def _operation_ended(self, one: Sequence, event: events.Operated) -> None:
        match event:
            case events.HandoverAnswered(_, state):
                one.handover.answered(state, self._now_s)
                self._pull(one)
            case events.CopiesFound(_, copies):
                one.found(copies)
                self._pull(one)
            case events.CopiesRead(_, read, missed):
                one.arrival.copies_read(read, missed)
                self._pull(one)
            case events.PartsRead(_, read, missed):
                one.arrival.parts_read(read, missed)
                self._pull(one)
            case events.BlocksPut():
                self._held.put_ended(one)
            case _:
                assert_never(event)

    def _pull(self, one: Sequence) -> None:
        """Read what can be read; go on when all is there, or nothing more will come."""
        if one.phase is not Phase.PULLING:
            return
        copies = one.arrival.take_copies()
        if copies:
            self._out.append(events.ReadCopies(one.ref, copies))
        parts = one.arrival.take_parts()
        if parts:
            self._out.append(events.ReadParts(one.ref, parts))
        if one.arrival.complete:
            one.fed = one.begun - 1
            self._have_all(one, Phase.RUNNING)
        elif one.finding:
            pass  # what is found may be all
        elif one.handover.over and one.arrival.settled:
            self._have_all(one, Phase.FILLING)
        elif one.handover.ask(self._now_s) and one.handover.prefill is not None:
            self._out.append(events.AskHandover(one.ref, one.handover.prefill))

    def _have_all(self, one: Sequence, phase: Phase) -> None:
        """Nothing more is wanted of prefill."""
        one.phase = phase
        one.complete_s = self._now_s
        if one.handover.prefill is not None:
            self._out.append(self._farewells.say(one.ref, one.handover.prefill))

    def _step_ended(self, event: events.StepEnded) -> None:
        step = self._step
        if step is None or step.step != event.step:
            return
        self._step = None
        done = event.outcome is events.StepOutcome.DONE
        if done:
            self._measured(step, event)
        sampled = {one.ref: one for one in event.sampled}
        failed = {one.ref: one.reason for one in event.failed}
        for row in step.rows:
            one = self._held.get(row.ref)
            if one is None:
                continue
            one.in_step = False
            if one.dying:
                self._held.let_go(one)
            elif row.ref in failed:
                self._fail(one, "engine", failed[row.ref])
            elif done:
                self._computed(one, row, sampled.get(row.ref))
            else:
                self._fail(one, "engine", event.reason)

    def _measured(self, step: events.Step, event: events.StepEnded) -> None:
        self._cost.add(event.whole or step.shape, event.ms)
        self._busy.add(event.ms, self._now_s)
        if all(len(row.tokens) == 1 for row in step.rows):
            self._step_ms += (event.ms - self._step_ms) / 8

    def _computed(
        self, one: Sequence, row: events.Row, drawn: events.Sampled | None
    ) -> None:
        one.computed(row)
        if one.phase is Phase.FILLING and one.arrival.complete:
            one.phase = Phase.RUNNING
            one.fed = max(one.fed, one.begun - 1)
        if drawn is not None:
            words = one.drawn(drawn, self._me, self._now_s)
            self._out.append(events.ToGateway(one.work.gateway, words))
        if one.answer.finish is None:
            self._held.offer_blocks(one)
        elif self._held.attached and one.wants_closing and one.phase is Phase.RUNNING:
            one.phase = Phase.CLOSING
        else:
            self._finished(one)

    # what turns the worker as a whole

    def _turned(self, event: Turned) -> None:
        match event:
            case events.ModelLoaded():
                self._model = event
                self._held.layers = event.layers
                self._readiness = replace(self._readiness, model=event)
                self._held.pages = PageLedger(
                    event.capacity_tokens // event.block_tokens
                )
            case events.StoreAttached(attached):
                self._held.attached = attached
            case events.Drain() | events.Resume():
                self._readiness = self._readiness.turned(event)
            case events.GiveUp():
                for one in self._held.all():
                    if one.phase is not Phase.ENDED:
                        self._fail(one, "draining", "the worker ends")
            case events.Fenced(me):
                self._fenced(me)
            case events.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _fenced(self, me: NodeRef) -> None:
        self._me = me
        self._early.clear()
        self._farewells.clear()
        self._held.fenced()

    def _tick(self) -> None:
        self._busy.tick(self._now_s)
        self._early.expire(self._now_s)
        for ref in self._held.owners.expire(self._now_s):
            self._held.cancel(ref)
        for one in self._held.all():
            self._tick_one(one)
        self._out.extend(self._farewells.due(self._now_s))

    def _tick_one(self, one: Sequence) -> None:
        if one.phase is Phase.ENDED:
            kept = self._now_s - one.ended_s <= self._limits.ended_kept_s
            if not kept and not one.forgotten:
                self._held.acknowledged(one)
        elif not one.said_first and self._now_s > one.deadline_s:
            self._fail(one, "deadline", "no token in time")
        else:
            self._pull(one)

    # ends

    def _finished(self, one: Sequence) -> None:
        self._held.end(one)
        if one.answer.finish_acked:
            self._held.acknowledged(one)
        else:
            self._held.let_go(one)

    def _fail(self, one: Sequence, code: str, reason: str) -> None:
        if one.answer.finish is not None:  # it has its answer, and was only closing
            self._finished(one)
            return
        failed = one.fail(self._me, code, reason)
        self._out.append(events.ToGateway(one.work.gateway, failed))
        self._held.end(one)
        self._held.let_go(one)

    # what is next

    def _schedule(self) -> None:
        if self._step is None and not self._held.make_room():
            self._begin_step()
            return  # those that run come before those that wait
        self._admit()
        if self._step is None:
            self._begin_step()

    def _admit(self) -> None:
        for one in self._held.in_phase(Phase.WAITING):
            if one.answer.finish is not None:
                words = one.words(one.answer.count, (), self._me, self._now_s)
                self._out.append(events.ToGateway(one.work.gateway, words))
                self._held.end(one)
            elif self._held.bind(one):
                self._pull(one)
            else:
                break

    def _begin_step(self) -> None:
        rows = next_rows(self._held.all(), self._limits)
        if rows:
            self._steps += 1
            self._step = events.Step(self._steps, rows)
            stepping = {row.ref for row in rows}
            for one in self._held.all():
                one.in_step = one.ref in stepping
            self._out.append(self._step)
