"""A prefill worker: first come first served, the next prompts load while one computes.

A thinner drive than ``kvtide.prefill.queue``, whose default order it has; a test has both
compute the same in the same order at the same times
(``tests/sim/test_sim_perf_prefill.py``). As there, a prompt whose next block an earlier
one is making loads it when that one is done; who is ready passes who still loads or waits.
It leaves out: chunks (each prompt is one step, so one that passes an earlier one is computed
to its end) and short prompts that share a step; how long a prompt has the patience to wait
for another's blocks, and those of other workers; when loading doesn't pay; what fails, is
cancelled or refused.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.bus.messages import PrefillLoad
from kvtide.policy import PrefillCurve
from kvtide.prefill.limits import PREPARED_TIMES
from kvtide.sim.kernel import Kernel


@dataclass(slots=True, eq=False)
class Job:
    """A prompt. ``load`` begins to load what is reused and says ``loaded`` at the end.

    It says so before it returns where there is nothing to load.
    ``blocks`` are its full ones, of which the first ``chosen`` come from elsewhere.
    ``reused_tokens`` is what it is expected to reuse, once it loads what it does.
    """

    number: int
    tokens: int
    blocks: tuple[int, ...]
    chosen: int
    load: "Callable[[Job], None]"
    computing: "Callable[[Job], None]"
    done: "Callable[[Job], None]"
    reused_tokens: int = 0
    loading: bool = False
    loaded: bool = False
    loaded_s: float = 0.0
    began_s: float = -1.0
    computed: bool = False


class PrefillWorker:
    """One engine's queue."""

    def __init__(
        self,
        kernel: Kernel,
        curve: PrefillCurve,
        *,
        layers: int,
        prepare_ahead: int,
        block_tokens: int,
        there: Callable[[int], bool],
    ) -> None:
        """Empty. ``there``: whether a block is in this host's store."""
        self._kernel = kernel
        self._curve = curve
        self._layers = layers
        self._ahead = prepare_ahead
        self._block_tokens = block_tokens
        self._there = there
        self._line: list[Job] = []
        self._computing: Job | None = None
        self._preparing = False
        self._making = Counter[int]()
        self.busy_s = 0.0

    def take(self, job: Job) -> None:
        """One more at the end of the line."""
        there = job.chosen
        while there < len(job.blocks) and job.blocks[there] in self._making:
            there += 1
        job.reused_tokens = there * self._block_tokens
        self._making.update(job.blocks[job.chosen :])
        self._line.append(job)
        self._go_on()

    def loaded(self, job: Job) -> None:
        """All that the job reuses is here."""
        job.loaded, job.loaded_s = True, self._kernel.now_s
        if job.computed:
            self._computed(job)
        elif not self._preparing:
            self._go_on()

    def load(self) -> PrefillLoad:
        """What a beat says."""
        if not self._line:
            return PrefillLoad()
        now_s = self._kernel.now_s
        queue_ms = sum(self._job_ms(job) for job in self._line)
        first = self._computing
        if first is not None:
            passed_ms = (now_s - first.began_s) * 1000
            queue_ms -= min(self._job_ms(first), passed_ms)
        waiting = len(self._line) - 1
        return PrefillLoad(queued=waiting, running=1, queue_ms=max(queue_ms, 1e-3))

    def _job_ms(self, job: Job) -> float:
        return self._curve.ms(job.tokens - job.reused_tokens, job.reused_tokens)

    def _go_on(self) -> None:
        self._prepare()
        if self._begin():
            self._prepare()

    def _prepare(self) -> None:
        """Load for the first in line, but who wants what an earlier one makes."""
        prepared, most = 0, self._ahead
        if sum(self._prepared(job) for job in self._line) >= PREPARED_TIMES * most:
            return
        for job in self._line:
            if prepared >= most:
                return
            if self._prepared(job):
                prepared += 1
            elif not job.loading and not self._waits(job):
                prepared += 1
                job.loading = self._preparing = True
                job.load(job)
                self._preparing = False

    def _prepared(self, job: Job) -> bool:
        return job.loading and job.began_s < 0

    def _begin(self) -> bool:
        """Compute who is first of those whose load has ended; of all, if none has."""
        ready = [job for job in self._line if self._prepared(job)]
        if self._computing is not None or not ready:
            return False
        job = next((job for job in ready if job.loaded), ready[0])
        self._computing = job
        job.began_s = self._kernel.now_s
        job.computing(job)
        self._kernel.at(self._job_ms(job) / 1000, lambda: self._computed(job))
        return True

    def _waits(self, job: Job) -> bool:
        """Whether another makes the next block that isn't there for it."""
        at = job.chosen
        while at < len(job.blocks) and self._there(job.blocks[at]):
            at += 1
        return at < len(job.blocks) and any(
            other.loading
            and other.reused_tokens <= at * self._block_tokens
            and at < len(other.blocks)
            and other.blocks[at] == job.blocks[at]
            for other in self._line
        )

    def _computed(self, job: Job) -> None:
        """Layer by layer: the last one's compute can't begin before its load's end."""
        job.computed = True
        if not job.loaded:
            return
        last_s = self._job_ms(job) / 1000 / self._layers
        rest_s = job.loaded_s + last_s - self._kernel.now_s
        if rest_s > 0 and job.loaded_s > job.began_s + last_s * (self._layers - 1):
            self._kernel.at(rest_s, lambda: self._end(job))
        else:
            self._end(job)

    def _end(self, job: Job) -> None:
        self.busy_s += self._kernel.now_s - job.began_s
        self._computing = None
        self._begin()  # who is ready comes before who waits for this one's blocks
        self._line.remove(job)
        self._making.subtract(job.blocks[job.chosen :])
        for block in job.blocks[job.chosen :]:
            if not self._making[block]:
                del self._making[block]
        job.done(job)
        self._go_on()
