"""The prefill worker's queue: what is computed when, and who is told. Pure."""

from dataclasses import replace
from typing import assert_never

from kvtide.bus.messages import (
    Ack,
    Failure,
    PartsReady,
    PartSums,
    PrefillLoad,
    PrefillWork,
    PutSlot,
    WorkAccepted,
    WorkRefused,
)
from kvtide.bus.ownership import Ownership, Standing
from kvtide.kv import NodeRef, RequestRef
from kvtide.prefill import events
from kvtide.prefill.events import Command, Event, Heard, Progressed, Turned
from kvtide.prefill.intake import (
    crowded,
    load_of,
    next_chunks,
    next_to_prepare,
    predicted_start_ms,
    unfit,
)
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.limits import PrefillLimits
from kvtide.worker.custody import TOO_LATE, Readiness, refused, released
from kvtide.worker.events import OwnerSaid
from kvtide.worker.pace import Pace


class PrefillMachine:
    """First come, first served. Each job ends once: done, failed, or let go unsaid.

    What a job holds (a run, a lease) is freed with ``Free`` and ``Release`` exactly
    once, and never while an operation of the shell on it is under way.
    """

    def __init__(self, me: NodeRef, limits: PrefillLimits) -> None:
        """``me`` is this worker's life; a fence replaces it."""
        self._me = me
        self._limits = limits
        self._readiness = Readiness()
        self._shared = False
        self._jobs: dict[RequestRef, Job] = {}
        self._owners = Ownership()
        self._step: events.Step | None = None
        self._steps = 0
        self._aborted = False
        self._compute = Pace(limits.initial_tokens_per_s)
        self._load = Pace(1e9)
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
                | events.PullArrived()
                | events.TakenArrived()
                | events.MemberGone()
            ):
                self._heard(event)
            case (
                events.Loaded()
                | events.SlotsGranted()
                | events.PartsWritten()
                | events.StepEnded()
                | events.Committed()
            ):
                self._progressed(event)
            case events.OpenFailed(ref, reason):
                self._open_failed(ref, reason)
            case _:
                self._turned(event)
        self._schedule()
        return self._out

    @property
    def idle(self) -> bool:
        """Nothing is waiting or being computed, and nothing is held."""
        return not any(
            job.opened or job.leased or job.phase is not Phase.SETTLED
            for job in self._jobs.values()
        )

    @property
    def jobs(self) -> int:
        """Jobs that are known, ended ones that decode has not taken included."""
        return len(self._jobs)

    def load(self) -> PrefillLoad:
        """What the conductor is told."""
        return load_of(self._jobs.values(), self._compute, self._load)

    # what others say

    def _heard(self, event: Heard) -> None:
        match event:
            case events.WorkArrived(work):
                self._out.append(events.Reply(self._work(work)))
            case events.CancelArrived() | events.OwnedArrived() | events.MemberGone():
                self._owner_said(event)
            case events.PullArrived(pull):
                self._pull(RequestRef(pull.request, pull.attempt))
            case events.TakenArrived(taken):
                self._taken(RequestRef(taken.request, taken.attempt))
            case _:
                assert_never(event)

    def _owner_said(self, event: OwnerSaid) -> None:
        for ref in released(self._owners, event, self._now_s):
            self._cancel(ref)
        if isinstance(event, events.CancelArrived):
            self._out.append(events.Reply(Ack()))
        elif isinstance(event, events.MemberGone):
            self._decode_gone(event.node)

    def _work(self, work: PrefillWork) -> WorkAccepted | WorkRefused:
        ref = RequestRef(work.request, work.attempt)
        standing = self._owners.judge(ref, work.gateway, self._now_s)
        if standing is Standing.HELD:
            return self._accepted(ref)
        refusal = (
            TOO_LATE.get(standing)
            or unfit(work, self._readiness, self._me)
            or crowded(work, tuple(self._jobs.values()), self._limits, self._compute)
        )
        model = self._readiness.model
        if refusal is not None or model is None:
            return refused(ref, refusal or TOO_LATE[Standing.STALE])
        self._cancel(self._owners.held(ref.request))
        self._owners.hold(ref, work.gateway)
        self._jobs[ref] = Job.of(work, model.block_tokens, self._now_s)
        return self._accepted(ref)

    def _accepted(self, ref: RequestRef) -> WorkAccepted:
        start_ms = predicted_start_ms(ref, self._jobs.values(), self._compute)
        return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=start_ms)

    def _cancel(self, ref: RequestRef | None) -> None:
        """Let a job go without a word."""
        if ref is None or ref not in self._jobs:
            return
        self._owners.drop(ref, self._now_s, cancelled=True)
        self._forget(self._jobs[ref])

    def _pull(self, ref: RequestRef) -> None:
        job = self._jobs.get(ref)
        if job is None or job.forgotten:
            reason = "no such request and attempt here"
            self._out.append(events.Reply(Failure(code="unknown", reason=reason)))
            return
        self._out.append(events.Reply(job.state()))

    def _taken(self, ref: RequestRef) -> None:
        self._out.append(events.Reply(Ack()))
        job = self._jobs.get(ref)
        if job is None or job.forgotten:
            return
        if job.phase is Phase.COMMITTING or self._in_last_chunk(job):
            job.taken = True  # the blocks still go to the pool
            return
        self._owners.drop(ref, self._now_s)
        self._forget(job)

    def _in_last_chunk(self, job: Job) -> bool:
        """Whether its last KV is written and only the rest of the step is left.

        Decode may have pulled the last layer's parts before the step has ended.
        """
        return self._step is not None and any(
            chunk.ref == job.ref and chunk.end == job.end for chunk in self._step.chunks
        )

    def _decode_gone(self, node: NodeRef) -> None:
        for job in list(self._jobs.values()):
            decode = job.work.decode
            if decode.node == node.node and decode.epoch <= node.epoch:
                self._cancel(job.ref)

    # what the shell reports

    def _progressed(self, event: Progressed) -> None:
        if isinstance(event, events.StepEnded):
            self._step_ended(event)
            return
        job = self._jobs.get(event.ref)
        if job is None:
            return
        match event:
            case events.PartsWritten(_, parts):
                self._written(job, parts)
            case events.Loaded() if job.phase is Phase.LOADING:
                self._loaded(job, event)
            case events.SlotsGranted(_, slots) if job.phase is Phase.GRANTING:
                if not self._died(job):
                    self._granted(job, slots)
            case events.Committed() if job.phase is Phase.COMMITTING:
                if not self._died(job):
                    self._done(job)
            case _:
                pass  # the end of an operation that this job does not have

    def _open_failed(self, ref: RequestRef, reason: str) -> None:
        job = self._jobs.get(ref)
        if job is not None and job.phase is not Phase.SETTLED and not job.dying:
            self._fail(job, "no_memory", reason)

    def _died(self, job: Job) -> bool:
        """An operation has ended: was it what a dying job waited for?"""
        if not job.dying:
            return False
        job.phase = Phase.SETTLED
        self._let_go(job)
        return True

    def _loaded(self, job: Job, loaded: events.Loaded) -> None:
        self._load.add(loaded.bytes, loaded.ms / 1000)
        job.load_ms += loaded.ms
        job.loaded(loaded.blocks)
        if self._died(job):
            return
        if job.leased:  # these were found there when it asked for slots
            self._plan(job)
        else:
            self._ask_for_slots(job)

    def _ask_for_slots(self, job: Job) -> None:
        wanted = job.wanted()
        if not wanted:
            self._granted(job, ())
            return
        job.phase = Phase.GRANTING
        job.leased = True
        self._out.append(events.Begin(job.ref, wanted))

    def _granted(self, job: Job, slots: tuple[PutSlot, ...]) -> None:
        if job.leased and not (slots and job.granted(slots)):
            job.phase = Phase.READY
            self._fail(job, "no_slots", "the store has no room for the prompt's blocks")
        elif job.ahead and job.puts:
            job.phase = Phase.LOADING
            self._out.append(events.Load(job.ref, job.ahead, job.first_block))
        else:
            job.loaded(len(job.ahead))  # decode alone reads them
            self._plan(job)

    def _plan(self, job: Job) -> None:
        self._out.append(events.ToDecode(job.work.decode, job.make_plan(self._me)))
        self._advance(job)

    def _advance(self, job: Job) -> None:
        """The job has KV up to ``job.at``: what does it wait for now?"""
        if job.at < job.end:
            job.phase = Phase.READY
        elif job.puts:
            job.phase = Phase.COMMITTING
            self._out.append(events.Commit(job.ref))
        else:
            self._done(job)

    def _written(self, job: Job, parts: tuple[PartSums, ...]) -> None:
        if job.dying or job.phase is not Phase.COMPUTING:
            return
        job.parts.extend(parts)
        ready = PartsReady(
            request=job.ref.request,
            attempt=job.ref.attempt,
            prefill=self._me,
            seq=job.messages,
            parts=parts,
        )
        job.messages += 1
        self._out.append(events.ToDecode(job.work.decode, ready))

    def _step_ended(self, event: events.StepEnded) -> None:
        step = self._step
        if step is None or step.step != event.step:
            return
        self._step = None
        if event.outcome is events.StepOutcome.DONE:
            tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
            self._compute.add(tokens, event.ms / 1000)
        for chunk in step.chunks:
            job = self._jobs[chunk.ref]
            job.compute_ms += event.ms
            if self._died(job):
                continue
            job.phase = Phase.READY
            if event.outcome is events.StepOutcome.DONE:
                job.at = chunk.end
                self._advance(job)
            elif event.outcome is events.StepOutcome.FAILED:
                self._fail(job, "engine", event.reason)

    # what turns the worker as a whole

    def _turned(self, event: Turned) -> None:
        match event:
            case events.ModelLoaded():
                self._readiness = replace(self._readiness, model=event)
            case events.StoreAttached(attached):
                self._readiness = replace(self._readiness, attached=attached)
                if not attached:
                    self._fail_all("no_store", "the store on this host has gone")
            case events.EngineShared(shared):
                self._shared = shared
            case events.Drain():
                self._readiness = replace(self._readiness, draining=True)
            case events.GiveUp():
                self._fail_all("draining", "the worker ends")
            case events.Fenced(me):
                self._fenced(me)
            case events.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _fail_all(self, code: str, reason: str) -> None:
        for job in list(self._jobs.values()):
            if job.phase is not Phase.SETTLED and not job.dying:
                self._fail(job, code, reason)

    def _fenced(self, me: NodeRef) -> None:
        self._me = me
        self._owners.fenced(self._now_s)
        for job in list(self._jobs.values()):
            job.leased = False  # the lease was the old life's: its store has it back
            self._forget(job)

    def _tick(self) -> None:
        for ref in self._owners.expire(self._now_s):
            self._cancel(ref)
        for job in list(self._jobs.values()):
            if job.phase is Phase.SETTLED:
                failed = job.failed is not None
                kept_s = (
                    self._limits.failed_kept_s if failed else self._limits.done_kept_s
                )
                if self._now_s - job.settled_s > kept_s and not job.forgotten:
                    self._owners.drop(job.ref, self._now_s)
                    self._forget(job)
            elif self._now_s > job.deadline_s and not job.dying:
                self._fail(job, "deadline", "the prefill did not end in time")

    # ends

    def _done(self, job: Job) -> None:
        done = job.finish(self._me)
        self._settle(job)
        self._out.append(events.ToDecode(job.work.decode, done))
        self._out.append(events.ToGateway(job.work.gateway, done))
        if job.opened:  # decode reads from the slots
            job.opened = False
            self._out.append(events.Free(job.ref))
        if job.taken:
            self._owners.drop(job.ref, self._now_s)
            self._forget(job)

    def _fail(self, job: Job, code: str, reason: str) -> None:
        failed = job.fail(self._me, code, reason)
        self._out.append(events.ToDecode(job.work.decode, failed))
        self._out.append(events.ToGateway(job.work.gateway, failed))
        self._let_go(job)

    def _settle(self, job: Job) -> None:
        job.phase = Phase.SETTLED
        job.settled_s = self._now_s

    def _forget(self, job: Job) -> None:
        job.forgotten = True
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        """Free what the job holds, or note that it is to be freed."""
        if job.busy:
            job.dying = True
            self._abort_if_in_vain()
            return
        self._settle(job)
        if job.leased:
            job.leased = False
            self._out.append(events.Release(job.ref))
        if job.opened:
            job.opened = False
            self._out.append(events.Free(job.ref))
        if job.forgotten:
            del self._jobs[job.ref]

    def _abort_if_in_vain(self) -> None:
        step = self._step
        if step is None or self._aborted:
            return
        if all(self._jobs[chunk.ref].dying for chunk in step.chunks):
            self._aborted = True
            self._out.append(events.Abort(step.step))

    # what is next

    def _schedule(self) -> None:
        while (job := next_to_prepare(self._jobs.values(), self._limits)) is not None:
            self._prepare(job)
        if self._step is None:
            self._begin_step()

    def _prepare(self, job: Job) -> None:
        job.started_s = self._now_s
        job.opened = True
        self._out.append(events.Open(job.work, job.ref, job.capacity_tokens))
        copies = job.reuse
        if copies:
            job.phase = Phase.LOADING
            self._out.append(events.Load(job.ref, copies))
        else:
            self._ask_for_slots(job)

    def _begin_step(self) -> None:
        chunks = next_chunks(self._jobs.values(), self._limits, shared=self._shared)
        if not chunks:
            return
        self._steps += 1
        self._aborted = False
        self._step = events.Step(self._steps, chunks)
        for chunk in chunks:
            self._jobs[chunk.ref].phase = Phase.COMPUTING
        self._out.append(self._step)
