"""Whether new work is taken, and what comes next. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtide.bus.messages import PrefillLoad, PrefillWork, RefuseCode
from kvtide.bus.ownership import Standing
from kvtide.kv import NodeRef, RequestRef
from kvtide.prefill.events import ChunkSpec, ModelLoaded
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.pace import Pace

TOO_LATE = {
    Standing.STALE: (RefuseCode.STALE_ATTEMPT, "a newer attempt is known, or it ended"),
    Standing.CANCELLED: (RefuseCode.CANCELLED, "this attempt was cancelled"),
    Standing.FENCED: (RefuseCode.STALE_ATTEMPT, "a newer life of the gateway is known"),
}
"""The refusals of work that comes too late."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a worker has to work with."""

    model: ModelLoaded | None = None
    attached: bool = False
    draining: bool = False

    def unfit(self, work: PrefillWork, me: NodeRef) -> tuple[RefuseCode, str] | None:
        """Why this work can't be done here at all."""
        if work.worker not in (None, me):
            return RefuseCode.OTHER_LIFE, "it was meant for another life of this worker"
        if self.draining:
            return RefuseCode.DRAINING, "the worker is ending"
        if self.model is None:
            return RefuseCode.LOADING, "the model is still loading"
        if not self.attached:
            return RefuseCode.NO_STORE, "no store on this host to put blocks into"
        return _misfit(work, self.model)


def _misfit(work: PrefillWork, model: ModelLoaded) -> tuple[RefuseCode, str] | None:
    if work.model != model.model:
        return RefuseCode.UNKNOWN_MODEL, f"this worker serves {model.model}"
    if not 0 < len(work.tokens) <= model.max_tokens:
        return RefuseCode.TOO_LARGE, f"at most {model.max_tokens} tokens"
    if len(work.keys) < (len(work.tokens) - 1) // model.block_tokens:
        return RefuseCode.TOO_LARGE, "a key for each full block is missing"
    return None


def crowded(
    work: PrefillWork, jobs: Sequence[Job], limits: PrefillLimits, pace: Pace
) -> tuple[RefuseCode, str] | None:
    """Why this work can't be done soon enough."""
    queued = [job for job in jobs if job.waits]
    if len(queued) >= limits.queued or len(jobs) >= limits.jobs:
        return RefuseCode.BUSY, "the queue is full"
    tokens = sum(job.left for job in queued)
    if queued and tokens + len(work.tokens) > limits.queued_tokens:
        return RefuseCode.BUSY, f"{tokens} tokens are waiting already"
    ahead = sum(job.left for job in jobs)
    if pace.seconds(ahead) * 1000 > work.deadline_ms:
        return RefuseCode.BUSY, "the deadline can't be met"
    return None


def predicted_start_ms(ref: RequestRef, jobs: Iterable[Job], pace: Pace) -> float:
    """When the job ``ref`` will begin: after all that came before it."""
    ahead = 0
    for job in jobs:
        if job.ref == ref:
            break
        ahead += job.left
    return pace.seconds(ahead) * 1000


def load_of(jobs: Iterable[Job], compute: Pace, load: Pace) -> PrefillLoad:
    """What the conductor is told."""
    known = tuple(jobs)
    queued = [job for job in known if job.waits]
    running = [job for job in known if job.phase is Phase.COMPUTING]
    return PrefillLoad(
        queued=len(queued),
        queued_tokens=sum(job.left for job in queued),
        running=len(running),
        running_tokens_left=sum(job.left for job in running),
        tokens_per_s=compute.per_s,
        load_bytes_per_s=load.per_s,
    )


def next_to_prepare(jobs: Iterable[Job], limits: PrefillLimits) -> Job | None:
    """The next job that loads and gets its slots, if there is room for one more.

    One whose next block another job is making waits until that one's blocks are in the
    pool, and then loads them: it would have to wait for the engine anyway. If the other
    job is cancelled, it makes them itself.
    """
    known = tuple(jobs)
    prepared = sum(job.waits and job.phase is not Phase.QUEUED for job in known)
    if prepared >= limits.prepare_ahead:
        return None
    making = {key for job in known for key in job.making}
    for job in known:
        if job.phase is Phase.QUEUED and job.next_key not in making:
            return job
    return None


def next_chunks(
    jobs: Iterable[Job], limits: PrefillLimits, *, shared: bool
) -> tuple[ChunkSpec, ...]:
    """The chunks of the next step: the first ready job's, and short ones with it."""
    ready = [job for job in jobs if job.phase is Phase.READY]
    if not ready:
        return ()
    first = ready[0]
    chunks = [first.chunk(limits.shared_step_tokens if shared else limits.step_tokens)]
    room = limits.batch_tokens - (chunks[0].end - chunks[0].start)
    for job in ready[1:]:
        if job.left > room:
            break
        chunks.append(job.chunk(room))
        room -= job.left
    return tuple(chunks)
