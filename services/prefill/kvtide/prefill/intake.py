"""Whether new work is taken, and what comes next. Pure."""

from collections.abc import Iterable, Sequence

from kvtide.bus.messages import PrefillLoad, PrefillWork, RefuseCode
from kvtide.kv import NodeRef, RequestRef
from kvtide.prefill.events import ChunkSpec
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.limits import PrefillLimits
from kvtide.worker.custody import Readiness, Refusal
from kvtide.worker.pace import Pace


def unfit(work: PrefillWork, ready: Readiness, me: NodeRef) -> Refusal | None:
    """Why this work can't be done here at all."""
    refusal = ready.unfit(work, me)
    if refusal is None and ready.model is not None:
        longest = ready.model.max_tokens
        if not 0 < len(work.tokens) <= longest:
            return RefuseCode.TOO_LARGE, f"at most {longest} tokens"
        if not ready.attached:
            return RefuseCode.NO_STORE, "no store on this host to put blocks into"
    return refusal


def crowded(
    work: PrefillWork, jobs: Sequence[Job], limits: PrefillLimits, pace: Pace
) -> Refusal | None:
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
