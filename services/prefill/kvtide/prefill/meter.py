"""What a prefill worker has measured of itself, and says of its load. Pure."""

from collections.abc import Iterable

from kvtide.bus.messages import PrefillLoad
from kvtide.prefill import events
from kvtide.prefill.intake import queue_ms
from kvtide.prefill.job import Job, Phase
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.loads import LoadRates
from kvtide.worker.pace import Pace
from kvtide.worker.steps import Busy, StepCost, StepShape


class Meter:
    """How fast it computes and loads, by its own steps and loads."""

    def __init__(self, limits: PrefillLimits) -> None:
        """Nothing is measured: what the limits assume."""
        self.compute = Pace(limits.initial_tokens_per_s)
        self.cost = StepCost(0.0, 1000 / limits.initial_tokens_per_s)
        self.rates = LoadRates(limits.rate_kept_s)
        self.busy = Busy()

    def loaded(self, job: Job, loaded: events.Loaded, flows: int, now_s: float) -> None:
        """A load of the job has ended, beside ``flows`` others."""
        after = job.copies_from(loaded.first + loaded.blocks, 1)
        self.rates.add(
            job.copies_from(loaded.first, loaded.blocks),
            loaded.blocks * job.block_tokens,
            loaded.bytes,
            loaded.ms,
            now_s,
            max(0, flows),
            short=after[0] if after and not loaded.whole else None,
        )

    def stepped(self, step: events.Step, event: events.StepEnded, now_s: float) -> None:
        """A step has ended that waited for nothing."""
        if event.outcome is not events.StepOutcome.DONE:
            return
        shape = StepShape.of([(chunk.start, chunk.end) for chunk in step.chunks])
        self.compute.add(shape.new, event.ms / 1000)
        self.busy.add(event.ms, now_s)
        self.cost.add(event.whole or shape, event.ms)

    def load_of(self, jobs: Iterable[Job]) -> PrefillLoad:
        """What the conductor is told."""
        known = tuple(jobs)
        queued = [job for job in known if job.waits]
        running = [job for job in known if job.phase is Phase.COMPUTING]
        return PrefillLoad(
            queued=len(queued),
            queued_tokens=sum(job.left for job in queued),
            running=len(running),
            running_tokens_left=sum(job.left for job in running),
            tokens_per_s=self.compute.per_s,
            load_bytes_per_s=self.rates.all.per_s,
            reused_tokens_per_s=self.rates.tokens.per_s,
            queue_ms=queue_ms(known, self.cost),
            loads=self.rates.count,
            load=self.rates.last,
            step=self.cost.last,
            busy_share=self.busy.share,
            bound=self.cost.bound,
        )
