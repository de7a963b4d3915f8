"""A prefill worker: first come first served, the next prompts load while one computes.

A thinner drive than ``kvtide.prefill.queue``, whose default order it has: it leaves out
that short prompts share a step, and that a prompt may pass one which still loads. As
there, a prompt whose next block an earlier one is making loads when that one is done.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from kvtide.bus.messages import PrefillLoad
from kvtide.policy import PrefillCurve
from kvtide.sim.kernel import Kernel


@dataclass(slots=True, eq=False)
class Job:
    """A prompt. ``load`` begins to load what is reused and says ``loaded`` at the end.

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
    ) -> None:
        """Empty."""
        self._kernel = kernel
        self._curve = curve
        self._layers = layers
        self._ahead = prepare_ahead
        self._block_tokens = block_tokens
        self._line: deque[Job] = deque()
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

    def load(self) -> PrefillLoad:
        """What a beat says."""
        if not self._line:
            return PrefillLoad()
        now_s = self._kernel.now_s
        queue_ms = sum(self._job_ms(job) for job in self._line)
        first = self._line[0]
        if first.began_s >= 0:
            passed_ms = (now_s - first.began_s) * 1000
            queue_ms -= min(self._job_ms(first), passed_ms)
        waiting = len(self._line) - 1
        return PrefillLoad(queued=waiting, running=1, queue_ms=max(queue_ms, 1e-3))

    def _job_ms(self, job: Job) -> float:
        return self._curve.ms(job.tokens - job.reused_tokens, job.reused_tokens)

    def _go_on(self) -> None:
        for place, job in enumerate(self._line):
            if place > self._ahead:
                break
            if not job.loading and not self._waits(job, place):
                job.loading = True
                job.load(job)
        if self._line and self._line[0].began_s < 0:
            job = self._line[0]
            job.began_s = self._kernel.now_s
            job.computing(job)
            compute_s = self._job_ms(job) / 1000
            self._kernel.at(compute_s, lambda: self._computed(job))

    def _waits(self, job: Job, place: int) -> bool:
        """Whether one before it in the line makes the next block that it wants."""
        at = job.chosen
        return at < len(job.blocks) and any(
            other.chosen <= at < len(other.blocks)
            and other.blocks[at] == job.blocks[at]
            for other in islice(self._line, place)
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
        self._line.popleft()
        self._making.subtract(job.blocks[job.chosen :])
        for block in job.blocks[job.chosen :]:
            if not self._making[block]:
                del self._making[block]
        job.done(job)
        self._go_on()
