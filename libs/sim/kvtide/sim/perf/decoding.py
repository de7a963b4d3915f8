"""A decode worker: continuous batching, first come first served, all KV reserved.

A thinner drive than ``kvtide.decode.batcher``, which says every token; a test has both do
the same to the step (``tests/sim/test_sim_perf_workers.py``). It leaves out: preemption,
since room for the whole answer is bound at once; pages, memory counts in tokens; what an
answer's blocks keep of it while they go to the pool; refusals, so that what does not fit
at all gets the memory alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtide.bus.messages import DecodeLoad
from kvtide.policy import StepCurve
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.steps import Floats, Row, StepLog, run_ms


@dataclass(frozen=True, slots=True)
class _Promised:
    """What waits for room, and is told of it."""

    tokens: int
    room: Callable[[], None]


class DecodeWorker:
    """One engine's batch. ``first`` is told of each row's first token, and when."""

    def __init__(
        self,
        kernel: Kernel,
        curve: StepCurve,
        *,
        batch: int,
        capacity_tokens: int,
        first: Callable[[int, float], None],
        told: bool = True,
    ) -> None:
        """Empty. ``told``: whether it reports requests that are yet to come."""
        self._kernel = kernel
        self._curve = curve
        self._batch = batch
        self._capacity = capacity_tokens
        self._first = first
        self._told = told
        self._promised: dict[int, _Promised] = {}
        self._bound: dict[int, int] = {}
        self._bound_tokens = 0
        self._joining: list[Row] = []
        self._rows: list[Row] = []
        self._kv_tokens = 0
        self._log = StepLog()
        self._began_s = 0.0
        self._ends_s: Floats = np.zeros(0)
        self._times_ms: Floats = np.zeros(0)
        self._planned = 0
        self._plan = 0
        self._between_steps = False
        self.busy_s = 0.0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._rows)

    def promise(self, number: int, tokens: int, room: Callable[[], None]) -> None:
        """A request will come. ``room`` is called once it has a seat and its memory.

        ``tokens`` are those of its prompt and its whole answer.
        """
        self._promised[number] = _Promised(tokens, room)
        self._bind()

    def forget(self, number: int) -> None:
        """It will not come."""
        if self._promised.pop(number, None) is None:
            self._bound_tokens -= self._bound.pop(number)
        self._bind()

    def next_step_ms(self, kv_tokens: int) -> float:
        """A step of the batch with all that have joined, and one more of this size."""
        rows = len(self._rows) + len(self._joining) + 1
        joining = sum(row.kv_tokens for row in self._joining)
        return self._curve.ms(rows, self._kv_tokens + joining + kv_tokens)

    def load(self) -> DecodeLoad:
        """What a beat says. What is not in the batch yet is promised, bound or not."""
        rows = len(self._rows)
        used = sum(self._bound[row.number] for row in self._rows)
        if self._told:
            waiting = len(self._bound) + len(self._promised) - rows
            promised = sum(each.tokens for each in self._promised.values())
            promised += self._bound_tokens - used
        else:
            waiting = len(self._joining)
            promised = sum(self._bound[row.number] for row in self._joining)
        return DecodeLoad(
            waiting=waiting,
            running=rows,
            kv_tokens_used=used,
            kv_tokens_promised=promised,
            kv_tokens_capacity=self._capacity,
            step_ms=self._curve.ms(rows, self._kv_tokens) if rows else 0.0,
        )

    def worst_ms(self, row: Row) -> float:
        """The request's TBT: the mean of its longest tenth of gaps."""
        return self._log.worst_ms(row.first_step, row.last_step)

    def join(self, row: Row) -> None:
        """All its KV is here, in the room that it has: it is in the next step."""
        self._joining.append(row)
        if self._between_steps:
            return
        if not self._rows:
            self._turn()
        elif self._planned > 1:
            done_s = self._kernel.now_s - self._began_s
            under_way = int(np.searchsorted(self._ends_s, done_s, side="right"))
            self._stop_after(min(under_way + 1, self._planned))

    def _bind(self) -> None:
        """In the order in which they were promised; who does not fit stops the rest."""
        while self._promised and len(self._bound) < self._batch:
            number, first = next(iter(self._promised.items()))
            if self._bound and self._bound_tokens + first.tokens > self._capacity:
                return
            del self._promised[number]
            self._bound[number] = first.tokens
            self._bound_tokens += first.tokens
            first.room()

    def _turn(self) -> None:
        """Between two steps: take who has joined, go on."""
        now_s = self._kernel.now_s
        new, self._joining = self._joining, []
        for row in new:
            row.first_step = self._log.steps + 1
            row.last_step = self._log.steps + row.output_tokens
            self._kv_tokens += row.kv_tokens
            self._rows.append(row)
        if not self._rows:
            return
        left = min(row.last_step for row in self._rows) - self._log.steps
        times_ms = run_ms(self._curve, len(self._rows), self._kv_tokens, left)
        self._times_ms = times_ms
        self._ends_s = np.cumsum(times_ms) / 1000
        self._began_s = now_s
        for row in new:
            self._first(row.number, now_s + float(self._ends_s[0]))
        self._stop_after(len(times_ms))

    def _stop_after(self, steps: int) -> None:
        self._planned = steps
        self._plan += 1
        plan = self._plan
        end_s = self._began_s + float(self._ends_s[steps - 1])
        delay_s = max(0.0, end_s - self._kernel.now_s)
        self._kernel.at(delay_s, lambda: self._stepped(plan))

    def _stepped(self, plan: int) -> None:
        if plan != self._plan:
            return
        steps = self._planned
        oldest = min(row.first_step for row in self._rows) - 1
        self._log.add(self._times_ms[:steps], oldest)
        self.busy_s += float(self._ends_s[steps - 1])
        self._kv_tokens += steps * len(self._rows)
        done = [row for row in self._rows if row.last_step <= self._log.steps]
        self._between_steps = True
        if done:
            self._leave(done)
        self._between_steps = False
        self._turn()

    def _leave(self, done: list[Row]) -> None:
        self._rows = [row for row in self._rows if row.last_step > self._log.steps]
        for row in done:
            self._bound_tokens -= self._bound.pop(row.number)
            self._kv_tokens -= row.kv_tokens + row.output_tokens
            row.ended(self.worst_ms(row))
        self._bind()
