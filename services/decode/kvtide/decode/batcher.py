"""The decode worker's batch: who has memory, who runs, what is said. Pure."""

from collections.abc import Callable
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
from kvtide.decode.events import BlockCopy, Command, Event, Heard, Progressed, Turned
from kvtide.decode.farewell import Farewells
from kvtide.decode.handover import EarlyWords, Said
from kvtide.decode.intake import (
    TOO_LATE,
    crowded,
    misfit,
    next_rows,
    predicted_start_ms,
)
from kvtide.decode.limits import DecodeLimits
from kvtide.decode.pages import PageLedger
from kvtide.decode.sequence import BlockKeys, Phase, Sequence, unknown_page
from kvtide.kv import NodeRef, RequestRef


class DecodeMachine:
    """Continuous batching. Each accepted request ends once: finished, failed, or let go.

    Pages are bound, first come first served, for prompt and longest answer together,
    before anything is pulled; ``Free`` gives them back, exactly once, and never while
    the shell uses the run.
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
        self._attached = False
        self._draining = False
        self._pages = PageLedger(0)
        self._sequences: dict[RequestRef, Sequence] = {}
        self._owners = Ownership()
        self._early = EarlyWords(limits)
        self._farewells = Farewells(limits)
        self._step: events.Step | None = None
        self._steps = 0
        self._step_ms = limits.initial_step_ms
        self._now_s = 0.0
        self._out: list[Command] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
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
                events.HandoverAnswered()
                | events.TakenAnswered()
                | events.CopiesRead()
                | events.PartsRead()
                | events.StepEnded()
                | events.BlocksPut()
            ):
                self._progressed(event)
            case _:
                self._turned(event)
        self._schedule()
        return self._out

    @property
    def idle(self) -> bool:
        """Nobody waits, runs, or has tokens that were not acknowledged."""
        return not self._sequences

    @property
    def pages(self) -> PageLedger:
        """The memory's book."""
        return self._pages

    @property
    def requests(self) -> int:
        """Requests that are known, ended ones that are not acknowledged included."""
        return len(self._sequences)

    def load(self) -> DecodeLoad:
        """What the conductor is told.

        ``running`` are those that the engine works for, so that a counter of steps
        which stands still while there are some means that the engine hangs.
        """
        size = self._model.block_tokens if self._model else 1
        waiting = self._in(Phase.WAITING)
        running = len(next_rows(tuple(self._sequences.values()), self._limits))
        return DecodeLoad(
            waiting=len(waiting) + len(self._in(Phase.PULLING)),
            running=running,
            kv_tokens_used=self._pages.used * size,
            kv_tokens_promised=sum(one.pages for one in waiting) * size,
            kv_tokens_capacity=self._pages.capacity * size,
            step_ms=self._step_ms,
        )

    def _in(self, phase: Phase) -> list[Sequence]:
        return [one for one in self._sequences.values() if one.phase is phase]

    # what others say

    def _heard(self, event: Heard) -> None:
        match event:
            case events.WorkArrived(work):
                self._out.append(events.Reply(self._work(work)))
            case events.CancelArrived(cancel):
                ref = RequestRef(cancel.request, cancel.attempt)
                self._cancel(self._owners.cancel(ref, self._now_s))
                self._out.append(events.Reply(Ack()))
            case events.OwnedArrived(owned):
                for ref in self._owners.listed(
                    owned.owner, owned.seq, owned.requests, self._now_s
                ):
                    self._cancel(ref)
            case events.MemberGone(node):
                self._member_gone(node)
            case events.AckArrived(ack):
                self._ack(ack)
            case events.PullArrived(pull):
                self._out.append(events.Reply(self._page(pull)))
            case events.HandoverSaid(said):
                self._said(said)
            case _:
                assert_never(event)

    def _work(self, work: DecodeWork) -> WorkAccepted | WorkRefused:
        ref = RequestRef(work.request, work.attempt)
        standing = self._owners.judge(ref, work.gateway, self._now_s)
        if standing is Standing.HELD:
            return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=0.0)
        taken = TOO_LATE.get(standing) or self._take(work)
        if not isinstance(taken, Sequence):
            code, reason = taken
            return WorkRefused(
                request=ref.request, attempt=ref.attempt, code=code, reason=reason
            )
        others = tuple(self._sequences.values())
        start_ms = predicted_start_ms(
            taken, others, self._pages, self._limits, self._step_ms
        )
        self._cancel(self._owners.held(ref.request))
        self._owners.hold(ref, work.gateway)
        self._sequences[ref] = taken
        for said in self._early.take(ref):
            taken.handover.hear(said, self._now_s)
        return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=start_ms)

    def _take(self, work: DecodeWork) -> Sequence | tuple[RefuseCode, str]:
        if self._draining:
            return RefuseCode.DRAINING, "the worker is ending"
        model = self._model
        if model is None:
            return RefuseCode.LOADING, "the model is still loading"
        refusal = misfit(work, model)
        if refusal is not None:
            return refusal
        taken = Sequence.of(work, self._keys(work), model, self._limits, self._now_s)
        others = tuple(self._sequences.values())
        return crowded(taken, others, self._pages, self._limits, self._step_ms) or taken

    def _cancel(self, ref: RequestRef | None) -> None:
        """Let a request go without a word."""
        if ref is None or ref not in self._sequences:
            return
        self._owners.drop(ref, self._now_s, cancelled=True)
        self._forget(self._sequences[ref])

    def _member_gone(self, node: NodeRef) -> None:
        for ref in self._owners.gone(node):
            self._cancel(ref)
        for one in list(self._sequences.values()):
            if one.handover.gone(node):
                self._pull(one)
        self._farewells.gone(node)

    def _ack(self, ack: TokenAck) -> None:
        one = self._sequences.get(RequestRef(ack.request, ack.attempt))
        if one is None or one.forgotten:
            return
        one.answer.ack(ack.index, finished=ack.finished)
        if one.phase is Phase.ENDED and (one.answer.finish_acked or ack.finished):
            self._owners.drop(one.ref, self._now_s)
            self._forget(one)

    def _page(self, pull: TokenPull) -> TokenPage:
        one = self._sequences.get(RequestRef(pull.request, pull.attempt))
        if one is None or one.forgotten:
            return unknown_page(pull)
        return one.page(pull)

    def _said(self, said: Said) -> None:
        one = self._sequences.get(RequestRef(said.request, said.attempt))
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
                return
            case events.TakenAnswered(ref, acked):
                self._farewells.answered(ref, acked=acked, now_s=self._now_s)
                return
            case _:
                one = self._sequences.get(event.ref)
        if one is None:
            return
        match event:
            case events.HandoverAnswered(_, state):
                one.handover.answered(state, self._now_s)
                self._pull(one)
            case events.CopiesRead(_, read, missed):
                one.arrival.copies_read(read, missed)
                self._pull(one)
            case events.PartsRead(_, read, missed):
                one.arrival.parts_read(read, missed)
                self._pull(one)
            case events.BlocksPut():
                one.putting = False
                self._offer_blocks(one)
                if one.dying:
                    self._let_go(one)
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
            one.fed = len(one.work.tokens) - 1
            self._have_all(one, Phase.RUNNING)
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
        if done and all(len(row.tokens) == 1 for row in step.rows):
            self._step_ms += (event.ms - self._step_ms) / 8
        sampled = {one.ref: one.token for one in event.sampled}
        for row in step.rows:
            one = self._sequences[row.ref]
            one.in_step = False
            if one.dying:
                self._let_go(one)
            elif done:
                self._computed(one, row, sampled.get(row.ref))
            else:
                self._fail(one, "engine", event.reason)

    def _computed(self, one: Sequence, row: events.Row, token: int | None) -> None:
        one.computed(row)
        if one.phase is Phase.FILLING and one.arrival.complete:
            one.phase = Phase.RUNNING
            one.fed = max(one.fed, len(one.work.tokens) - 1)
        if token is not None:
            words = one.drawn(token, self._me, self._now_s)
            self._out.append(events.ToGateway(one.work.gateway, words))
        if one.answer.finish is not None:
            self._end(one)
            self._let_go(one)
        else:
            self._offer_blocks(one)

    def _offer_blocks(self, one: Sequence) -> None:
        wanted = one.opened and not one.forgotten and one.failed is None
        if not self._attached or not wanted or one.putting:
            return
        blocks = one.take_blocks(self._limits.put_blocks)
        if not blocks:
            return
        one.putting = True
        one.puts += 1
        self._out.append(events.PutBlocks(one.ref, one.puts, blocks))

    # what turns the worker as a whole

    def _turned(self, event: Turned) -> None:
        match event:
            case events.ModelLoaded():
                self._model = event
                self._pages = PageLedger(event.capacity_tokens // event.block_tokens)
            case events.StoreAttached(attached):
                self._attached = attached
            case events.Drain():
                self._draining = True
            case events.GiveUp():
                for one in list(self._sequences.values()):
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
        self._owners.fenced(self._now_s)
        self._early.clear()
        self._farewells.clear()
        for one in list(self._sequences.values()):
            self._forget(one)

    def _tick(self) -> None:
        self._early.expire(self._now_s)
        for ref in self._owners.expire(self._now_s):
            self._cancel(ref)
        for one in list(self._sequences.values()):
            self._tick_one(one)
        self._out.extend(self._farewells.due(self._now_s))

    def _tick_one(self, one: Sequence) -> None:
        if one.phase is Phase.ENDED:
            kept = self._now_s - one.ended_s <= self._limits.ended_kept_s
            if not kept and not one.forgotten:
                self._owners.drop(one.ref, self._now_s)
                self._forget(one)
        elif not one.said_first and self._now_s > one.deadline_s:
            self._fail(one, "deadline", "no token in time")
        else:
            self._pull(one)

    # ends

    def _fail(self, one: Sequence, code: str, reason: str) -> None:
        failed = one.fail(self._me, code, reason)
        self._out.append(events.ToGateway(one.work.gateway, failed))
        self._end(one)
        self._let_go(one)

    def _forget(self, one: Sequence) -> None:
        one.forgotten = True
        self._end(one)
        self._let_go(one)

    def _end(self, one: Sequence) -> None:
        if one.phase is not Phase.ENDED:
            one.phase = Phase.ENDED
            one.ended_s = self._now_s

    def _let_go(self, one: Sequence) -> None:
        """Free what the sequence holds, or note that it is to be freed."""
        self._offer_blocks(one)
        if one.busy:
            one.dying = True
            return
        if one.opened:
            one.opened = False
            self._pages.release(one.ref)
            self._out.append(events.Free(one.ref))
        if one.forgotten:
            del self._sequences[one.ref]

    # what is next

    def _schedule(self) -> None:
        for one in self._in(Phase.WAITING):
            if one.answer.finish is not None:
                words = one.words(one.answer.count, (), self._me, self._now_s)
                self._out.append(events.ToGateway(one.work.gateway, words))
                self._end(one)
            elif not self._bind(one):
                break
        if self._step is not None:
            return
        rows = next_rows(tuple(self._sequences.values()), self._limits)
        if rows:
            self._steps += 1
            self._step = events.Step(self._steps, rows)
            for row in rows:
                self._sequences[row.ref].in_step = True
            self._out.append(self._step)

    def _bind(self, one: Sequence) -> bool:
        full = self._pages.holders >= self._limits.batch
        if full or not self._pages.bind(one.ref, one.pages):
            return False
        one.phase = Phase.PULLING
        one.opened = True
        one.bound_s = self._now_s
        one.handover.begin(self._now_s)
        one.arrival.offer(
            BlockCopy(block, located) for block, located in enumerate(one.work.reuse)
        )
        self._out.append(events.Open(one.work, one.ref, one.pages * one.block_tokens))
        self._pull(one)
        return True
