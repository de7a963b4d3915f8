"""Who comes next, and how much of it a step computes. Pure."""

from collections.abc import Iterable

from kvtide.kv import BlockKey, NodeRef
from kvtide.prefill.events import ChunkSpec, EngineShared
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.limits import PREPARED_TIMES, PrefillLimits, QueueOrder
from kvtide.prefill.peers import Peers
from kvtide.worker.steps import NO_STEP, StepCost, StepShape

_SHARE_OF_TARGET = 0.9
"""What a step is predicted to take of the longest that it may: predictions err."""
_IN_PROGRESS = frozenset({Phase.COMPUTING, Phase.COMMITTING})


class Line:
    """The order of jobs, by policy and by what steps were measured to cost."""

    def __init__(
        self, limits: PrefillLimits, cost: StepCost, peers: Peers | None = None
    ) -> None:
        """``cost`` is measured and ``peers`` are heard by another."""
        self._limits = limits
        self._cost = cost
        self._peers = Peers() if peers is None else peers

    def ordered(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs, first one first."""
        known = list(jobs)
        if self._limits.order is QueueOrder.SLACK:
            known.sort(key=lambda job: job.due_s - self._cost.ms(job.shape_left) / 1000)
        return known

    def to_prepare(self, jobs: Iterable[Job], now_s: float, me: NodeRef) -> Job | None:
        """The next job that loads and gets its slots, if there is room for one more.

        One whose next block another job is making waits until that block is in the
        pool, and then loads it; no longer than making it would take, unless the other
        is being computed: it would have to wait for the engine anyway. If the other is
        cancelled, the first that waits makes it. What another worker makes is waited
        for no longer than that either, and not at all if it will take longer.
        """
        known = self.ordered(jobs)
        makers = {key: job for job in known for key in job.making}
        prepared, most = 0, self._limits.prepare_ahead
        if sum(_prepared(job) for job in known) >= PREPARED_TIMES * most:
            return None
        for job in known:
            if _prepared(job):
                prepared += 1
            elif job.phase is Phase.QUEUED and prepared < most:
                maker = makers.get(job.next_key) if job.next_key else None
                if maker is None:
                    job.behind = self._behind_peer(job, now_s, me)
                    if not job.behind:
                        return job
                elif self._out_of_patience(job, maker, makers, now_s):
                    return job
        return None

    def _behind_peer(self, job: Job, now_s: float, me: NodeRef) -> bool:
        """Whether it waits for its next block, which another worker makes."""
        key = job.next_key
        peer = None if key is None else self._peers.maker_of(key, (me, job.ref))
        if peer is None:
            return False
        if job.passed_s is None:
            job.passed_s = now_s
        until_s = job.passed_s + self._own_ms(job, peer.shared(job.work.keys)) / 1000
        soon = peer.waits or peer.due_s <= until_s
        return soon and now_s <= until_s

    def _out_of_patience(
        self, job: Job, maker: Job, makers: dict[BlockKey, Job], now_s: float
    ) -> bool:
        if maker.phase in _IN_PROGRESS or job.passed_s is None:
            job.passed_s = now_s
            return False
        shared = sum(makers.get(key) is maker for key in job.work.keys)
        return (now_s - job.passed_s) * 1000 > self._own_ms(job, shared)

    def _own_ms(self, job: Job, blocks: int) -> float:
        """How long the job would compute so many blocks."""
        start = max(job.first_block, len(job.reuse)) * job.block_tokens
        end = start + blocks * job.block_tokens
        return self._cost.ms(StepShape.of([(start, end)]))

    def chunks(
        self, jobs: Iterable[Job], shared: EngineShared
    ) -> tuple[ChunkSpec, ...]:
        """The chunks of the next step: the first ready job's, and short ones with it.

        A job whose prefix is still being loaded is computed beside its load only if
        nobody else could use the engine meanwhile.
        """
        ready = [job for job in self.ordered(jobs) if _can_step(job)]
        whole = [job for job in ready if not job.loads]
        if not whole:
            beside_load = [job for job in ready if not job.gated]
            if shared.shared or not beside_load:
                return ()
            return (self._chunk(beside_load[0], shared),)
        chunks = [self._chunk(whole[0], shared)]
        room = self._limits.batch_tokens - (chunks[0].end - chunks[0].start)
        for job in whole[1:]:
            if job.left > room:
                break
            chunks.append(job.chunk(room))
            room -= job.left
        return tuple(chunks)

    def _chunk(self, job: Job, shared: EngineShared) -> ChunkSpec:
        """As much as fits the target; of equal chunks, so that the last is no crumb."""
        fits = self._fits(job.at, shared)
        count = -(-job.left // fits)
        even = -(-job.left // count)
        size = job.block_tokens
        whole_blocks = (job.at + even + size - 1) // size * size - job.at
        return job.chunk(whole_blocks if whole_blocks <= fits else even)

    def _fits(self, start: int, shared: EngineShared) -> int:
        """Tokens from ``start`` on that a step may have.

        Where others say how long it may take, what they have in it counts, too.
        """
        limits = self._limits
        most, target_ms, beside = limits.step_tokens, limits.step_ms, NO_STEP
        if shared.shared and shared.target_ms:
            target_ms = min(target_ms, shared.target_ms * _SHARE_OF_TARGET)
            beside = shared.beside
        elif shared.shared:
            most, target_ms = limits.shared_step_tokens, limits.shared_step_ms
        fits = self._cost.tokens_within(target_ms, start, beside)
        return min(most, max(fits, min(limits.least_step_tokens, most)))


def _prepared(job: Job) -> bool:
    return job.waits and job.phase is not Phase.QUEUED


def _can_step(job: Job) -> bool:
    return job.phase is Phase.READY and job.at < job.end and not job.dying
