"""The baselines: each node an engine that does both halves of its requests."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvtide.policy.curves import attended_pairs
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.outcomes import Outcomes, Spent
from kvtide.sim.perf.pool import Tier
from kvtide.sim.perf.shapes import ClusterShape
from kvtide.sim.perf.steps import StepLog, run_ms
from kvtide.sim.perf.workload import SimRequest
from kvtide.store.eviction import Policy


class Coupled(StrEnum):
    """``PLAIN``: prompts first, whole, while decode waits, and nothing is kept.

    ``CACHED``: the same, and blocks stay in GPU memory until it is needed.
    ``CHUNKED``: each step is decode and, up to a number of tokens, pieces of prompts.
    """

    PLAIN = "plain"
    CACHED = "cached"
    CHUNKED = "chunked"


@dataclass(slots=True, eq=False)
class _Seat:
    """A request at an engine. Of its first gap ``skipped_ms`` were before it began."""

    request: SimRequest
    reused: int = 0
    computed: int = 0
    first_step: int = 0
    last_step: int = 0
    skipped_ms: float = 0.0
    ttft_ms: float = 0.0

    @property
    def reserved(self) -> int:
        """Tokens of KV that it may need."""
        return self.request.prompt_tokens + self.request.output_tokens


class CoupledEngine:
    """Continuous batching; room for a request's whole KV is reserved when it begins."""

    def __init__(
        self,
        kernel: Kernel,
        shape: ClusterShape,
        kind: Coupled,
        served: Callable[[float, float], None],
    ) -> None:
        """Empty. ``served`` is told TTFT and TBT in ms."""
        self._kernel, self._shape, self._kind = kernel, shape, kind
        self._served = served
        self._start_s = kernel.now_s
        self._step, self._prefill = shape.step, shape.prefill
        self._block_tokens = shape.text.model.block_tokens
        self._capacity = shape.kv_capacity_tokens
        blocks = self._capacity // self._block_tokens
        self._cache = Tier(blocks, Policy.LRU) if kind is Coupled.CACHED else None
        self._waiting: deque[_Seat] = deque()
        self._filling: deque[_Seat] = deque()
        self._rows: list[_Seat] = []
        self._reserved = self._kv_tokens = 0
        self._log = StepLog()
        self._stalled_ms = 0.0
        self._busy = False
        self._plan = 0
        self._cut: Callable[[], None] | None = None
        self.outstanding = 0
        self.prefill_s = self.decode_s = 0.0
        self.hit_tokens = 0

    def take(self, request: SimRequest) -> None:
        """One more in line."""
        seat = _Seat(request)
        self.outstanding += seat.reserved
        self._waiting.append(seat)
        if not self._busy:
            self._turn()
        elif self._cut is not None and self._fits(self._waiting[0]):
            self._cut()

    def _fits(self, seat: _Seat) -> bool:
        seats = len(self._rows) + len(self._filling)
        if seats >= self._shape.text.engine.batch:
            return False
        return not seats or self._reserved + seat.reserved <= self._capacity

    def _turn(self) -> None:
        """Between two steps."""
        self._cut = None
        self._busy = True
        if self._kind is Coupled.CHUNKED:
            while self._waiting and self._fits(self._waiting[0]):
                self._filling.append(self._begun())
            if self._filling:
                self._mixed()
                return
        elif self._waiting and self._fits(self._waiting[0]):
            self._whole()
            return
        if self._rows:
            self._decode()
        else:
            self._busy = False

    def _begun(self) -> _Seat:
        seat = self._waiting.popleft()
        self._reserved += seat.reserved
        cache, blocks = self._cache, seat.request.blocks
        if cache is not None:
            size = self._block_tokens
            usable = min(cache.prefix(blocks), (seat.request.prompt_tokens - 1) // size)
            seat.reused = seat.computed = usable * size
            self.hit_tokens += seat.reused
            self._keep(cache, blocks)
        return seat

    def _keep(self, cache: Tier, blocks: Sequence[int]) -> None:
        """What is generated takes memory from the cache; prompts are in it."""
        rows = sum(seat.request.output_tokens for seat in self._rows)
        cache.limit = max(0, (self._capacity - rows) // self._block_tokens)
        for depth in reversed(range(len(blocks))):
            if not cache.use(blocks[depth]):
                cache.put(blocks[depth], depth)

    # ---- prompts first

    def _whole(self) -> None:
        limit = self._shape.text.engine.prefill_batch_tokens
        batch: list[_Seat] = []
        tokens, ms = 0, self._shape.text.node.step_overhead_ms
        while self._waiting and self._fits(self._waiting[0]):
            if batch and tokens + self._waiting[0].request.prompt_tokens > limit:
                break
            seat = self._begun()
            self._filling.append(seat)
            new = max(1, seat.request.prompt_tokens - seat.reused)
            tokens += new
            ms += self._prefill.ms(new, seat.reused)
            batch.append(seat)
        self.prefill_s += ms / 1000
        self._kernel.at(ms / 1000, lambda: self._filled(batch, ms))

    def _filled(self, batch: list[_Seat], ms: float) -> None:
        self._stalled_ms += ms
        self._filling.clear()
        for seat in batch:
            self._has_first(seat)
        self._turn()

    def _has_first(self, seat: _Seat) -> None:
        """The prompt is done, and with it the first token there."""
        request = seat.request
        seat.ttft_ms = (self._kernel.now_s - self._start_s - request.at_s) * 1000
        seat.first_step = self._log.steps
        seat.last_step = seat.first_step + request.output_tokens - 1
        seat.skipped_ms = self._stalled_ms
        self._kv_tokens += request.prompt_tokens
        self._rows.append(seat)
        if request.output_tokens == 1:
            self._leave([seat])

    # ---- pieces of prompts

    def _mixed(self) -> None:
        left = max(1, self._shape.text.engine.chunk_tokens - len(self._rows))
        curve, compute_ms = self._prefill, self._step.row_ms * len(self._rows)
        rows, done = len(self._rows), list[_Seat]()
        for seat in self._filling:
            size = min(left, seat.request.prompt_tokens - seat.computed)
            pairs = attended_pairs(size, seat.computed)
            compute_ms += curve.token_ms * size + curve.pair_ms * pairs
            seat.computed += size
            left -= size
            if seat.computed == seat.request.prompt_tokens:
                done.append(seat)
            if not left:
                break
        decode_ms = self._step.ms(rows, self._kv_tokens) if rows else 0.0
        overhead_ms = self._shape.text.node.step_overhead_ms
        ms = max(decode_ms, self._step.fixed_ms, compute_ms + overhead_ms)
        self.prefill_s += (ms - decode_ms) / 1000
        self.decode_s += decode_ms / 1000
        self._kernel.at(ms / 1000, lambda: self._mixed_ended(done, ms))

    def _mixed_ended(self, done: list[_Seat], ms: float) -> None:
        self._stepped(np.array([ms]))
        for seat in done:
            self._filling.remove(seat)
            self._has_first(seat)
        self._turn()

    # ---- decode alone

    def _decode(self) -> None:
        left = min(seat.last_step for seat in self._rows) - self._log.steps
        times_ms = run_ms(self._step, len(self._rows), self._kv_tokens, left)
        ends_s = np.cumsum(times_ms) / 1000
        began_s = self._kernel.now_s

        def stop_after(steps: int) -> None:
            self._plan += 1
            plan = self._plan
            delay_s = began_s + float(ends_s[steps - 1]) - self._kernel.now_s
            self._kernel.at(delay_s, lambda: self._decoded(plan, times_ms[:steps]))

        def cut() -> None:
            passed_s = self._kernel.now_s - began_s
            under_way = int(np.searchsorted(ends_s, passed_s, side="right"))
            self._cut = None
            stop_after(min(under_way + 1, len(times_ms)))

        self._cut = cut
        stop_after(len(times_ms))

    def _decoded(self, plan: int, times_ms: np.ndarray) -> None:
        if plan != self._plan:
            return
        self.decode_s += float(times_ms.sum()) / 1000
        times_ms[0] += self._stalled_ms
        self._stepped(times_ms)
        self._stalled_ms = 0.0
        self._turn()

    def _stepped(self, times_ms: np.ndarray) -> None:
        oldest = min((seat.first_step for seat in self._rows), default=self._log.steps)
        self._log.add(times_ms, oldest)
        self._kv_tokens += len(times_ms) * len(self._rows)
        steps = self._log.steps
        self._leave([seat for seat in self._rows if seat.last_step <= steps])

    def _leave(self, done: list[_Seat]) -> None:
        for seat in done:
            self._rows.remove(seat)
            self._reserved -= seat.reserved
            self.outstanding -= seat.reserved
            self._kv_tokens -= seat.reserved - 1
            tbt_ms = self._log.worst_ms(
                seat.first_step, seat.last_step, skipped_ms=seat.skipped_ms
            )
            self._served(seat.ttft_ms, tbt_ms)


class CoupledCluster:
    """As many engines as the cluster has nodes; a request goes to the least loaded.

    The load of an engine is the tokens, prompts and answers, of all that it has not
    ended. One simulation: ``run`` once.
    """

    def __init__(
        self, shape: ClusterShape, kind: Coupled, requests: Iterable[SimRequest]
    ) -> None:
        """All engines are idle; ``requests`` are read as they arrive."""
        self.found = Outcomes()
        self._coming = iter(requests)
        self._all_here = False
        self._kernel = Kernel()
        self._start_s = self._kernel.now_s
        nodes = shape.text.prefills + shape.text.decodes
        self._engines = [
            CoupledEngine(self._kernel, shape, kind, self.found.served)
            for _ in range(nodes)
        ]

    def run(self) -> Spent:
        """Until every request is served."""
        self._next()
        while not self._all_here or self.found.ended < self.found.requests:
            self._kernel.run(60.0)
        self.found.hit_local = sum(engine.hit_tokens for engine in self._engines)
        return Spent(
            prefill_gpu_s=sum(engine.prefill_s for engine in self._engines),
            decode_gpu_s=sum(engine.decode_s for engine in self._engines),
            network_bytes=0.0,
            ssd_written_bytes=0.0,
            virtual_s=self._kernel.now_s - self._start_s,
        )

    def _next(self) -> None:
        request = next(self._coming, None)
        if request is None:
            self._all_here = True
            return
        at_s = self._start_s + request.at_s
        self._kernel.at(at_s - self._kernel.now_s, lambda: self._arrive(request))

    def _arrive(self, request: SimRequest) -> None:
        self.found.requests += 1
        self.found.prompt_tokens += request.prompt_tokens
        min(self._engines, key=lambda engine: engine.outstanding).take(request)
        self._next()
