"""A decode worker: continuous batching, first come first served, all KV reserved.

A thinner drive than ``kvtide.decode.batcher``, which says every token: what it leaves
out are pages bound one by one and preemption (room for the whole answer is reserved).
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from kvtide.bus.messages import DecodeLoad
from kvtide.policy import StepCurve
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.steps import Floats, Row, StepLog, run_ms


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
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._reserved = 0
        self._kv_tokens = 0
        self._log = StepLog()
        self._began_s = 0.0
        self._ends_s: Floats = np.zeros(0)
        self._times_ms: Floats = np.zeros(0)
        self._planned = 0
        self._plan = 0
        self._promised: dict[int, int] = {}
        self.busy_s = 0.0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._rows)

    def promise(self, number: int, tokens: int) -> None:
        """A request will come."""
        self._promised[number] = tokens

    def forget(self, number: int) -> None:
        """It will not come."""
        self._promised.pop(number, None)

    def next_step_ms(self, kv_tokens: int) -> float:
        """A step of the batch with all that wait, and one more of this size."""
        rows = len(self._rows) + len(self._waiting) + 1
        waiting = sum(row.kv_tokens for row in self._waiting)
        return self._curve.ms(rows, self._kv_tokens + waiting + kv_tokens)

    def load(self) -> DecodeLoad:
        """What a beat says."""
        rows = len(self._rows)
        step_ms = self._curve.ms(rows, self._kv_tokens) if rows else 0.0
        promised = sum(self._promised.values()) if self._told else 0
        promised += sum(row.kv_tokens + row.output_tokens for row in self._waiting)
        return DecodeLoad(
            waiting=len(self._waiting) + (len(self._promised) if self._told else 0),
            running=rows,
            kv_tokens_used=self._reserved,
            kv_tokens_promised=promised,
            kv_tokens_capacity=self._capacity,
            step_ms=step_ms,
        )

    def worst_ms(self, row: Row) -> float:
        """The request's TBT: the mean of its longest tenth of gaps."""
        return self._log.worst_ms(row.first_step, row.last_step)

    def join(self, row: Row) -> None:
        """All its KV is here: it joins at the next step's begin."""
        self.forget(row.number)
        self._waiting.append(row)
        if not self._rows:
            self._turn()
        elif self._planned > 1 and self._fits(self._waiting[0]):
            done_s = self._kernel.now_s - self._began_s
            under_way = int(np.searchsorted(self._ends_s, done_s, side="right"))
            self._stop_after(min(under_way + 1, self._planned))

    def _fits(self, row: Row) -> bool:
        if len(self._rows) >= self._batch:
            return False
        need = row.kv_tokens + row.output_tokens
        return not self._rows or self._reserved + need <= self._capacity

    def _turn(self) -> None:
        """Between two steps: let go who is done, take who fits, go on."""
        now_s = self._kernel.now_s
        new: list[Row] = []
        while self._waiting and self._fits(self._waiting[0]):
            row = self._waiting.popleft()
            row.first_step = self._log.steps + 1
            row.last_step = self._log.steps + row.output_tokens
            self._reserved += row.kv_tokens + row.output_tokens
            self._kv_tokens += row.kv_tokens
            self._rows.append(row)
            new.append(row)
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
        if done:
            self._rows = [row for row in self._rows if row.last_step > self._log.steps]
        for row in done:
            self._reserved -= row.kv_tokens + row.output_tokens
            self._kv_tokens -= row.kv_tokens + row.output_tokens
            row.ended(self.worst_ms(row))
        self._turn()
