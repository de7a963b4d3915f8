"""Whether new work is taken, and what is said of the load. Pure."""

from collections.abc import Iterable, Sequence

from kvtide.bus.messages import PrefillLoad, PrefillWork, RefuseCode
from kvtide.kv import BlockKey, NodeRef
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.loads import LoadRates
from kvtide.worker.custody import Readiness, Refusal
from kvtide.worker.pace import Pace
from kvtide.worker.steps import Busy, StepCost


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
    work: Job, jobs: Sequence[Job], limits: PrefillLimits, cost: StepCost
) -> Refusal | None:
    """Why this work can't be done soon enough."""
    queued = [job for job in jobs if job.waits]
    if len(queued) >= limits.queued or len(jobs) >= limits.jobs:
        return RefuseCode.BUSY, "the queue is full"
    tokens = sum(job.left for job in queued)
    if queued and tokens + work.left > limits.queued_tokens:
        return RefuseCode.BUSY, f"{tokens} tokens are waiting already"
    if queue_ms([*jobs, work], cost) > work.work.deadline_ms:
        return RefuseCode.BUSY, "the deadline can't be met"
    return None


def queue_ms(jobs: Iterable[Job], cost: StepCost) -> float:
    """How long it takes to compute all of these, one after the other.

    One that is queued loads what those before it have made.
    """
    total_ms, made = 0.0, set[BlockKey]()
    for job in jobs:
        total_ms += cost.ms(job.shape_after(made))
        made.update(job.unmade)
    return total_ms


def load_of(
    jobs: Iterable[Job], compute: Pace, loads: LoadRates, cost: StepCost, busy: Busy
) -> PrefillLoad:
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
        load_bytes_per_s=loads.all.per_s,
        reused_tokens_per_s=loads.tokens.per_s,
        queue_ms=queue_ms(known, cost),
        loads=loads.count,
        load=loads.last,
        step=cost.last,
        busy_share=busy.share,
        bound=cost.bound,
    )
