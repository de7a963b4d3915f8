"""The prefill role on an engine that runs whole requests by itself. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, assert_never

from kvtide.bus.messages import (
    Ack,
    Failure,
    HandoverState,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillTimes,
    PrefillWork,
    RefuseCode,
    SamplingSpec,
    WorkAccepted,
    WorkRefused,
)
from kvtide.bus.ownership import Ownership, Standing
from kvtide.engine.serving import Ask
from kvtide.kv import NodeRef, RequestRef
from kvtide.prefill import events
from kvtide.prefill.intake import unfit
from kvtide.prefill.limits import PrefillLimits
from kvtide.worker.custody import TOO_LATE, Readiness, refused, released
from kvtide.worker.events import OwnerSaid, Reply

GREEDY: Final = SamplingSpec(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Ends a ``Prepare``: the KV is in the pool, ``cached`` tokens were not computed."""

    ref: RequestRef
    cached: int


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """Ends a ``Prepare``: decode computes the prompt."""

    ref: RequestRef
    reason: str
    code: str = "engine"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have the engine compute a prompt → ``Prepared`` or ``PrepareFailed``."""

    ref: RequestRef
    ask: Ask


@dataclass(frozen=True, slots=True)
class Stop:
    """End a ``Prepare`` if it runs; nothing is heard of it any more."""

    ref: RequestRef


Heard = events.WorkArrived | OwnerSaid | events.PullArrived | events.TakenArrived
Progressed = Prepared | PrepareFailed
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
Command = Reply | events.ToGateway | events.ToDecode | Prepare | Stop


class Phase(StrEnum):
    """Where a prompt stands. ``LEFT``: to the decode role of this very node."""

    LEFT = "left"
    COMPUTED = "computed"
    ENDED = "ended"


@dataclass(slots=True)
class _Job:
    ref: RequestRef
    work: PrefillWork
    phase: Phase
    began_s: float
    ended_s: float = 0.0
    done: PrefillDone | None = None
    failed: PrefillFailed | None = None


class PreparingMachine:
    """Has the engine compute prompts for decode workers elsewhere.

    A prompt that is decoded on this very node is left to the engine as a whole: the
    decode role asks for it. What was computed is kept by a lease that ends by itself,
    so nothing is held here but a line, until decode has taken it.
    """

    def __init__(self, me: NodeRef, limits: PrefillLimits) -> None:
        """``me`` is this worker's life."""
        self._me = me
        self._limits = limits
        self._readiness = Readiness()
        self._owners = Ownership()
        self._jobs: dict[RequestRef, _Job] = {}
        self._tokens_per_s = limits.initial_tokens_per_s
        self._now_s = 0.0
        self._out: list[Command] = []

    @property
    def idle(self) -> bool:
        """Nothing is being computed."""
        return not any(job.phase is Phase.COMPUTED for job in self._jobs.values())

    def load(self) -> PrefillLoad:
        """What the conductor is told."""
        running = [one for one in self._jobs.values() if one.phase is Phase.COMPUTED]
        left = sum(len(one.work.tokens) for one in running)
        return PrefillLoad(
            running=len(running),
            running_tokens_left=left,
            tokens_per_s=self._tokens_per_s,
            queue_ms=left / self._tokens_per_s * 1000,
        )

    def handle(self, event: Event, now_s: float) -> Sequence[Command]:
        """Take one event; the commands are to be carried out in order."""
        self._now_s = now_s
        self._out = []
        match event:
            case events.WorkArrived(work):
                self._out.append(Reply(self._work(work)))
            case events.CancelArrived() | events.OwnedArrived() | events.MemberGone():
                self._owner_said(event)
            case events.PullArrived(pull):
                ref = RequestRef(pull.request, pull.attempt)
                self._out.append(Reply(self._state(ref)))
            case events.TakenArrived(taken):
                self._out.append(Reply(Ack()))
                self._let_go(RequestRef(taken.request, taken.attempt))
            case Prepared() | PrepareFailed():
                self._progressed(event)
            case events.OpenFailed():
                pass  # nothing is opened here
            case _:
                self._turned(event)
        return self._out

    # what others say

    def _owner_said(self, event: OwnerSaid) -> None:
        for ref in released(self._owners, event, self._now_s):
            self._let_go(ref, cancelled=True)
        if isinstance(event, events.CancelArrived):
            self._out.append(Reply(Ack()))
        elif isinstance(event, events.MemberGone):
            gone = event.node
            for job in list(self._jobs.values()):
                if job.work.decode.ends_with(gone):
                    self._let_go(job.ref, cancelled=True)

    def _work(self, work: PrefillWork) -> WorkAccepted | WorkRefused:
        ref = RequestRef(work.request, work.attempt)
        standing = self._owners.judge(ref, work.gateway, self._now_s)
        if standing is not Standing.HELD:
            refusal = TOO_LATE.get(standing) or unfit(work, self._readiness, self._me)
            if refusal is None and len(self._jobs) >= self._limits.jobs:
                refusal = RefuseCode.BUSY, "the queue is full"
            if refusal is not None:
                return refused(ref, refusal)
            self._take(ref, work)
        start_ms = self.load().queue_ms
        return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=start_ms)

    def _take(self, ref: RequestRef, work: PrefillWork) -> None:
        older = self._owners.held(ref.request)
        if older is not None:
            self._let_go(older, cancelled=True)
        self._owners.hold(ref, work.gateway)
        here = work.decode.node == self._me.node
        phase = Phase.LEFT if here else Phase.COMPUTED
        self._jobs[ref] = _Job(ref, work, phase, self._now_s)
        if not here:
            ask = Ask(
                ref=ref,
                tokens=work.tokens,
                answered=0,
                tenant=work.tenant,
                salt=work.salt,
                sampling=GREEDY,
                max_tokens=1,
                model=work.model,
            )
            self._out.append(Prepare(ref, ask))

    def _state(self, ref: RequestRef) -> HandoverState | Failure:
        job = self._jobs.get(ref)
        if job is None:
            reason = "no such request and attempt here"
            return Failure(code="unknown", reason=reason)
        return HandoverState(
            request=ref.request,
            attempt=ref.attempt,
            plan=None,
            parts=(),
            done=job.done,
            failed=job.failed,
        )

    # what the shell reports

    def _progressed(self, event: Progressed) -> None:
        job = self._jobs.get(event.ref)
        if job is None or job.phase is not Phase.COMPUTED:
            return
        match event:
            case Prepared(_, cached):
                self._prepared(job, cached)
            case PrepareFailed(_, reason, code):
                self._fail(job, code, reason)
            case _:
                assert_never(event)

    def _prepared(self, job: _Job, cached: int) -> None:
        took_s = self._now_s - job.began_s
        computed = max(0, len(job.work.tokens) - cached)
        if computed and took_s > 0:
            self._tokens_per_s += (computed / took_s - self._tokens_per_s) / 4
        job.done = PrefillDone(
            request=job.ref.request,
            attempt=job.ref.attempt,
            prefill=self._me,
            reused_tokens=cached,
            computed_tokens=computed,
            messages=0,
            times=PrefillTimes(queue_ms=0.0, load_ms=0.0, compute_ms=took_s * 1000),
        )
        self._ended(job, job.done)

    def _fail(self, job: _Job, code: str, reason: str) -> None:
        job.failed = PrefillFailed(
            request=job.ref.request,
            attempt=job.ref.attempt,
            prefill=self._me,
            code=code,
            reason=reason,
        )
        self._ended(job, job.failed)

    def _ended(self, job: _Job, said: PrefillDone | PrefillFailed) -> None:
        job.phase, job.ended_s = Phase.ENDED, self._now_s
        self._out.append(events.ToDecode(job.work.decode, said))
        self._out.append(events.ToGateway(job.work.gateway, said))
        self._out.append(Stop(job.ref))

    # what turns the worker as a whole

    def _turned(self, event: Turned) -> None:
        match event:
            case events.ModelLoaded():
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
        for job in self._jobs.values():
            if job.phase is Phase.COMPUTED:
                self._fail(job, "draining", "the worker ends")

    def _fenced(self, me: NodeRef) -> None:
        self._me = me
        for ref in list(self._jobs):
            self._let_go(ref)
        self._owners.fenced(self._now_s)

    def _tick(self) -> None:
        for ref in self._owners.expire(self._now_s):
            self._let_go(ref, cancelled=True)
        for job in list(self._jobs.values()):
            late_s = self._now_s - job.began_s - job.work.deadline_ms / 1000
            if job.phase is Phase.COMPUTED and late_s > 0:
                self._fail(job, "deadline", "nobody waits for it any more")
            kept_s = self._now_s - (job.ended_s or job.began_s)
            if job.phase is not Phase.COMPUTED and kept_s > self._limits.done_kept_s:
                self._let_go(job.ref)

    def _let_go(self, ref: RequestRef, *, cancelled: bool = False) -> None:
        """Nobody wants it any more; what of it is in the pool stays there."""
        self._owners.drop(ref, self._now_s, cancelled=cancelled)
        job = self._jobs.pop(ref, None)
        if job is not None and job.phase is Phase.COMPUTED:
            self._out.append(Stop(ref))
