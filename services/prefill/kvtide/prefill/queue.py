"""The prefill worker's queue: what is computed when, and who is told. Pure."""

from dataclasses import replace
from typing import assert_never

from kvtide.bus.messages import (
    Ack,
    BlocksMade,
    BlocksMaking,
    Failure,
    PartsReady,
    PartSums,
    PrefillLoad,
    PrefillWork,
    PutSlot,
    WorkAccepted,
    WorkRefused,
)
from kvtide.bus.ownership import Standing
from kvtide.kv import Located, NodeRef, RequestRef
from kvtide.prefill import events
from kvtide.prefill.events import Command, Event, Heard, Progressed, Turned
from kvtide.prefill.holdings import Holdings
from kvtide.prefill.intake import crowded, queue_ms, unfit
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.line import Line
from kvtide.prefill.loads import Rest, worth_loading
from kvtide.prefill.meter import Meter
from kvtide.prefill.peers import Peers, made, making
from kvtide.worker.custody import TOO_LATE, Readiness, refused, released
from kvtide.worker.events import OwnerSaid


class PrefillMachine:
    """A line in an order that is set. Each job ends once: done, failed, or let go unsaid."""

    def __init__(self, me: NodeRef, limits: PrefillLimits) -> None:
        """``me`` is this worker's life; a fence replaces it."""
        self._limits = limits
        self._readiness = Readiness()
        self._shared = events.EngineShared(shared=False)
        self._held = Holdings(me)
        self._steps = 0
        self._meter = Meter(limits)
        self._cost = self._meter.cost
        self._peers = Peers()
        self._line = Line(limits, self._cost, self._peers)
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
                | events.PullArrived()
                | events.TakenArrived()
                | events.PeerSaid()
                | events.MemberGone()
            ):
                self._heard(event)
            case (
                events.Checked()
                | events.Loaded()
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
        return self._held.idle

    @property
    def jobs(self) -> int:
        """Jobs that are known, ended ones that decode has not taken included."""
        return len(self._held)

    def load(self) -> PrefillLoad:
        """What the conductor is told."""
        return self._meter.load_of(self._held.all())

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
            case events.PeerSaid(said):
                self._peer_said(said)
            case _:
                assert_never(event)

    def _owner_said(self, event: OwnerSaid) -> None:
        for ref in released(self._held.owners, event, self._now_s):
            self._held.cancel(ref)
        if isinstance(event, events.CancelArrived):
            self._out.append(events.Reply(Ack()))
        elif isinstance(event, events.MemberGone):
            self._peers.gone(event.node)
            self._decode_gone(event.node)

    def _work(self, work: PrefillWork) -> WorkAccepted | WorkRefused:
        ref = RequestRef(work.request, work.attempt)
        standing = self._held.owners.judge(ref, work.gateway, self._now_s)
        if standing is Standing.HELD:
            return self._accepted(ref)
        model = self._readiness.model
        refusal = TOO_LATE.get(standing) or unfit(work, self._readiness, self._held.me)
        if refusal is not None or model is None:
            return refused(ref, refusal or TOO_LATE[Standing.STALE])
        job = Job.of(work, model.block_tokens, self._now_s)
        job.found(self._peers.copies)
        refusal = crowded(job, self._held.all(), self._limits, self._cost)
        if refusal is not None:
            return refused(ref, refusal)
        self._held.take(job, work.gateway)
        return self._accepted(ref)

    def _accepted(self, ref: RequestRef) -> WorkAccepted:
        """It begins after all that come before it."""
        start_ms = queue_ms(self._before(self._held.jobs[ref]), self._cost)
        return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=start_ms)

    def _before(self, job: Job) -> list[Job]:
        ordered = self._line.ordered(self._held.all())
        return ordered[: ordered.index(job)]

    def _pull(self, ref: RequestRef) -> None:
        job = self._held.known(ref)
        if job is None:
            reason = "no such request and attempt here"
            self._out.append(events.Reply(Failure(code="unknown", reason=reason)))
            return
        self._out.append(events.Reply(job.state()))

    def _taken(self, ref: RequestRef) -> None:
        self._out.append(events.Reply(Ack()))
        job = self._held.known(ref)
        if job is None:
            return
        if job.phase is Phase.COMMITTING or self._in_last_chunk(job):
            job.taken = True  # the blocks still go to the pool
            return
        self._held.drop(job)

    def _in_last_chunk(self, job: Job) -> bool:
        """Whether its last KV is written and only the rest of the step is left.

        Decode may have pulled the last layer's parts before the step has ended.
        """
        return self._held.step is not None and any(
            chunk.ref == job.ref and chunk.end == job.end
            for chunk in self._held.step.chunks
        )

    def _peer_said(self, said: BlocksMaking | BlocksMade) -> None:
        if said.prefill.node == self._held.me.node:
            return
        if isinstance(said, BlocksMaking):
            self._peers.making(said, self._now_s)
            return
        self._peers.made(said)
        self._found(said.located)

    def _found(self, copies: tuple[Located, ...]) -> None:
        """These are in the pool: whoever still waits need not have them made."""
        self._peers.found(copies)
        self._held.found(self._peers.copies)

    def _decode_gone(self, node: NodeRef) -> None:
        for job in self._held.all():
            if job.work.decode.ends_with(node):
                self._held.cancel(job.ref)

    # what the shell reports

    def _progressed(self, event: Progressed) -> None:
        if isinstance(event, events.StepEnded):
            self._step_ended(event)
            return
        job = self._held.get(event.ref)
        if job is None:
            return
        match event:
            case events.PartsWritten(_, parts):
                self._written(job, parts)
            case events.Checked(_, _, blocks) if job.phase is Phase.CHECKING:
                if blocks:  # else its end follows
                    self._checked(job, blocks)
            case events.Loaded(first=first) if first in job.loads:
                self._loaded(job, event)
            case events.SlotsGranted(_, slots) if job.phase is Phase.GRANTING:
                job.phase = Phase.READY
                if not self._held.died(job):
                    self._granted(job, slots)
            case events.Committed(_, stored) if job.committing:
                self._committed(job, stored)
            case _:
                pass  # the end of an operation that this job does not have

    def _open_failed(self, ref: RequestRef, reason: str) -> None:
        job = self._held.get(ref)
        if job is not None and job.phase is not Phase.SETTLED and not job.dying:
            self._held.fail(job, "no_memory", reason)

    def _checked(self, job: Job, blocks: int) -> None:
        """The copies are there; their bytes follow while slots are asked for."""
        job.loads[0] = blocks
        job.phase = Phase.READY
        job.promised(blocks)
        if not self._held.died(job):
            self._ask_for_slots(job)

    def _loaded(self, job: Job, loaded: events.Loaded) -> None:
        flows = sum(len(one.loads) for one in self._held.all()) - 1
        self._meter.loaded(job, loaded, flows, self._now_s)
        self._peers.loaded(job, loaded)
        job.load_ms += loaded.ms
        checking = job.phase is Phase.CHECKING
        if checking:
            job.phase = Phase.READY
            job.promised(loaded.blocks)
        job.loaded(loaded.first, loaded.blocks)
        if self._held.died(job):
            return
        if checking:
            self._ask_for_slots(job)
        elif job.phase is Phase.READY:
            self._advance(job)

    def _ask_for_slots(self, job: Job) -> None:
        wanted = job.wanted()
        if not wanted:
            self._granted(job, ())
            return
        job.phase = Phase.GRANTING
        job.leased = True
        self._out.append(events.Begin(job.ref, wanted))

    def _granted(self, job: Job, slots: tuple[PutSlot, ...]) -> None:
        """Load what was found there, if that pays, and tell decode what it will get."""
        if job.leased and not (slots and job.granted(slots)):
            self._held.fail(
                job, "no_slots", "the store has no room for the prompt's blocks"
            )
            return
        self._found(tuple(copy.located for copy in job.copies))
        ahead = job.ahead
        if ahead and job.puts:
            first, count = job.first_block, self._worth(job, ahead)
            if count:
                copies = ahead[:count]
                self._out.append(events.Load(job.ref, copies, first, promised=True))
                job.loads[first] = count
                job.promised(count)
        else:
            job.promised(len(ahead))  # decode alone reads them
        self._out.append(events.ToDecode(job.work.decode, job.make_plan(self._held.me)))
        self._tell_peers(job, waits=False)
        self._advance(job)

    def _tell_peers(self, job: Job, *, waits: bool) -> None:
        """Others need not compute what this job will bring into the pool."""
        left_ms = queue_ms(self._before(job), self._cost)
        left_ms += self._cost.ms(job.shape_left)
        said = making(job, self._held.me, left_ms, waits=waits)
        if said.keys:
            job.told = True
            self._out.append(events.ToPeers(said))

    def _worth(self, job: Job, copies: tuple[Located, ...]) -> int:
        """How many of these copies are loaded faster than they are computed."""
        size = job.block_tokens
        alone = not self._shared.shared and all(
            other is job or not other.waits for other in self._held.all()
        )
        return worth_loading(
            copies,
            Rest(job.first_block * size, job.end, size),
            self._meter.rates,
            self._cost,
            now_s=self._now_s,
            overlap=alone,
        )

    def _advance(self, job: Job) -> None:
        """The job has KV up to ``job.at``: what does it wait for now?"""
        job.phase = Phase.READY
        if job.at < job.end or job.loads:
            self._commit_some(job)
        elif job.puts:
            job.phase = Phase.COMMITTING
            if not job.committing:
                self._commit(job)
        else:
            self._held.done(job)

    def _commit_some(self, job: Job) -> None:
        """What is complete goes to the pool while the rest is computed."""
        complete = job.at // job.block_tokens
        news = any(job.committed <= block < complete for block in job.puts)
        if news and not job.committing and not job.loads:
            self._commit(job)

    def _commit(self, job: Job) -> None:
        job.committing = True
        job.commit_at = job.at
        self._out.append(events.Commit(job.ref))

    def _committed(self, job: Job, stored: tuple[Located, ...]) -> None:
        job.committing = False
        self._found(stored)
        if stored and job.told:
            said = made(job, self._held.me, stored, ended=False)
            self._out.append(events.ToPeers(said))
        job.committed = max(job.committed, job.commit_at // job.block_tokens)
        if self._held.died(job) or job.phase is not Phase.COMMITTING:
            return
        if job.commit_at < job.at:
            self._commit(job)
        else:
            self._held.done(job)

    def _written(self, job: Job, parts: tuple[PartSums, ...]) -> None:
        if job.dying or job.phase is not Phase.COMPUTING:
            return
        job.parts.extend(parts)
        ready = PartsReady(
            request=job.ref.request,
            attempt=job.ref.attempt,
            prefill=self._held.me,
            seq=job.messages,
            parts=parts,
        )
        job.messages += 1
        self._out.append(events.ToDecode(job.work.decode, ready))

    def _step_ended(self, event: events.StepEnded) -> None:
        step = self._held.step
        if step is None or step.step != event.step:
            return
        self._held.step = None
        if not self._held.beside_load:  # else it counts what it waited
            self._meter.stepped(step, event, self._now_s)
        for chunk in step.chunks:
            job = self._held.jobs[chunk.ref]
            job.compute_ms += event.ms
            job.phase = Phase.READY
            if event.outcome is events.StepOutcome.DONE:
                job.computed(chunk, event.ms, self._now_s)
            job.gated = event.outcome is events.StepOutcome.ABORTED
            job.fall_back()
            if self._held.died(job):
                continue
            if event.outcome is events.StepOutcome.FAILED:
                self._held.fail(job, "engine", event.reason)
            else:
                self._advance(job)

    # what turns the worker as a whole

    def _turned(self, event: Turned) -> None:
        match event:
            case events.ModelLoaded():
                self._readiness = replace(self._readiness, model=event)
            case events.StoreAttached(attached, node):
                self._meter.rates.near = node
                self._readiness = self._readiness.turned(event)
                if not attached:
                    self._held.fail_all("no_store", "the store on this host has gone")
            case events.EngineShared():
                self._shared = event
            case events.Drain() | events.Resume():
                self._readiness = self._readiness.turned(event)
            case events.GiveUp():
                self._held.fail_all("draining", "the worker ends")
            case events.Fenced(me):
                self._held.fenced(me)
            case events.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _tick(self) -> None:
        self._meter.busy.tick(self._now_s)
        for ref in self._held.owners.expire(self._now_s):
            self._held.cancel(ref)
        for job in self._held.all():
            if job.phase is Phase.SETTLED:
                failed = job.failed is not None
                kept_s = (
                    self._limits.failed_kept_s if failed else self._limits.done_kept_s
                )
                if self._now_s - job.settled_s > kept_s and not job.forgotten:
                    self._held.drop(job)
            elif self._now_s > job.deadline_s and not job.dying:
                self._held.fail(job, "deadline", "the prefill did not end in time")

    # what is next

    def _schedule(self) -> None:
        jobs = self._held.all()
        me = self._held.me
        while (job := self._line.to_prepare(jobs, self._now_s, me)) is not None:
            self._prepare(job)
        for job in jobs:
            if job.behind and not job.told:
                self._tell_peers(job, waits=True)
        if self._held.step is None:
            self._begin_step()

    def _prepare(self, job: Job) -> None:
        job.started_s = self._now_s
        job.opened = True
        self._out.append(events.Open(job.work, job.ref, job.capacity_tokens))
        count = self._worth(job, job.reuse)
        if count:
            job.phase = Phase.CHECKING
            job.loads[0] = 0
            self._out.append(events.Load(job.ref, job.reuse[:count]))
        else:
            self._ask_for_slots(job)

    def _begin_step(self) -> None:
        chunks = self._line.chunks(self._held.all(), self._shared)
        if not chunks:
            return
        self._steps += 1
        self._held.begin_step(events.Step(self._steps, chunks))
