"""Whether new work is taken. Pure."""

from collections.abc import Iterable, Sequence

from kvtide.bus.messages import PrefillWork, RefuseCode
from kvtide.kv import BlockKey, NodeRef
from kvtide.prefill.job import Job
from kvtide.prefill.limits import PrefillLimits
from kvtide.worker.custody import Readiness, Refusal
from kvtide.worker.steps import StepCost


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
