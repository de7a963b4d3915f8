"""The jobs that are here, what each holds, and how that is let go. Pure."""

from collections.abc import Mapping

from kvtide.bus.ownership import Ownership
from kvtide.kv import BlockKey, Located, NodeRef, RequestRef
from kvtide.prefill import events
from kvtide.prefill.events import Command
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.peers import made


class Holdings:
    """Jobs by request, their owners, and the step that works on some of them.

    What a job holds (a run, a lease) is freed with ``Free`` and ``Release`` exactly
    once, and never while an operation of the shell on it is under way.
    """

    def __init__(self, me: NodeRef) -> None:
        """``me`` is this worker's life; a fence replaces it."""
        self.me = me
        self.jobs: dict[RequestRef, Job] = {}
        self.owners = Ownership()
        self.step: events.Step | None = None
        self.beside_load = False
        self.now_s = 0.0
        self.out: list[Command] = []
        self._aborted = False

    def __len__(self) -> int:
        """Jobs that are known, ended ones that decode has not taken included."""
        return len(self.jobs)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or being computed, and nothing is held."""
        return not any(
            job.opened or job.leased or job.phase is not Phase.SETTLED
            for job in self.jobs.values()
        )

    def all(self) -> list[Job]:
        """All, in the order in which they came."""
        return list(self.jobs.values())

    def get(self, ref: RequestRef) -> Job | None:
        """One, also if only its end is waited for."""
        return self.jobs.get(ref)

    def known(self, ref: RequestRef) -> Job | None:
        """One that others may still speak of."""
        job = self.jobs.get(ref)
        return None if job is None or job.forgotten else job

    def take(self, job: Job, gateway: NodeRef) -> None:
        """A new one; an older attempt of the request is let go."""
        self.cancel(self.owners.held(job.ref.request))
        self.owners.hold(job.ref, gateway)
        self.jobs[job.ref] = job

    def begin_step(self, step: events.Step) -> None:
        """The engine works for these chunks from now on."""
        self.step = step
        self._aborted = False
        chunked = [self.jobs[chunk.ref] for chunk in step.chunks]
        self.beside_load = any(job.loads for job in chunked)
        for job in chunked:
            job.phase = Phase.COMPUTING
        self.out.append(step)

    def found(self, copies: Mapping[BlockKey, Located]) -> None:
        """These are in the pool: who is queued still reuses what follows its reuse."""
        for job in self.jobs.values():
            if job.phase is Phase.QUEUED:
                job.found(copies)

    # ends

    def cancel(self, ref: RequestRef | None) -> None:
        """Let a job go without a word."""
        if ref is None or ref not in self.jobs:
            return
        self.owners.drop(ref, self.now_s, cancelled=True)
        self.forget(self.jobs[ref])

    def fenced(self, me: NodeRef) -> None:
        """All of it was another life's, whose store has the leases back."""
        self.me = me
        self.owners.fenced(self.now_s)
        for job in self.all():
            job.leased = False
            self.forget(job)

    def drop(self, job: Job) -> None:
        """It has ended, and nobody will ask for it again."""
        self.owners.drop(job.ref, self.now_s)
        self.forget(job)

    def done(self, job: Job) -> None:
        """All is computed and committed."""
        done = job.finish(self.me)
        self._settle(job)
        self.out.append(events.ToDecode(job.work.decode, done))
        self.out.append(events.ToGateway(job.work.gateway, done))
        if job.opened:  # decode reads from the slots
            job.opened = False
            self.out.append(events.Free(job.ref))
        if job.taken:
            self.drop(job)

    def fail(self, job: Job, code: str, reason: str) -> None:
        """It ends without its KV."""
        failed = job.fail(self.me, code, reason)
        self.out.append(events.ToDecode(job.work.decode, failed))
        self.out.append(events.ToGateway(job.work.gateway, failed))
        self._let_go(job)

    def fail_all(self, code: str, reason: str) -> None:
        """All that has not ended does so."""
        for job in self.all():
            if job.phase is not Phase.SETTLED and not job.dying:
                self.fail(job, code, reason)

    def died(self, job: Job) -> bool:
        """An operation has ended: a dying job goes when it was the last one."""
        if job.dying and not job.busy:
            self._let_go(job)
        return job.dying or job.phase is Phase.SETTLED

    def forget(self, job: Job) -> None:
        """It goes without a word, now or when its operations have ended."""
        job.forgotten = True
        self._let_go(job)

    def _settle(self, job: Job) -> None:
        self._untell(job)
        job.phase = Phase.SETTLED
        job.settled_s = self.now_s

    def _let_go(self, job: Job) -> None:
        """Free what the job holds, or note that it is to be freed."""
        if job.busy:
            job.dying = True
            self._untell(job)
            self._abort_if_in_vain()
            return
        self._settle(job)
        if job.leased:
            job.leased = False
            self.out.append(events.Release(job.ref))
        if job.opened:
            job.opened = False
            self.out.append(events.Free(job.ref))
        if job.forgotten:
            del self.jobs[job.ref]

    def _untell(self, job: Job) -> None:
        """Other workers wait for its blocks no longer."""
        if job.told:
            job.told = False
            self.out.append(events.ToPeers(made(job, self.me, ended=True)))

    def _abort_if_in_vain(self) -> None:
        step = self.step
        if step is None or self._aborted:
            return
        if all(self.jobs[chunk.ref].dying for chunk in step.chunks):
            self._aborted = True
            self.out.append(events.Abort(step.step))
