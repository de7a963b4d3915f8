"""How full decode workers will be: what was placed there, over the time to come. Pure.

A request that was placed counts from when its prefill is predicted to be done, and less
and less as answers of its kind have ended by then. Until it begins it is pending. What
workers report and are booked is the present, pending requests included; the forecast is
only asked for the change from it.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.policy.admission import Prediction
from kvtide.policy.answers import AnswerLengths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stay:
    """A request at a decode worker: from ``start_s`` on, a token every ``tbt_ms``."""

    worker: int
    start_s: float
    tbt_ms: float
    kv_tokens: float
    max_new_tokens: float


@dataclass(frozen=True, slots=True)
class _Entry:
    column: int
    placed: int
    first: int
    share: Floats
    kv_tokens: float


@dataclass(frozen=True, slots=True)
class Coming:
    """By how much each worker's batch and KV tokens are predicted to change."""

    rows: Floats
    kv_tokens: Floats


class DecodeForecast:
    """Requests and KV tokens by worker and time, ``buckets`` of ``bucket_s`` ahead."""

    def __init__(
        self,
        prediction: Prediction,
        lengths: AnswerLengths | None = None,
        *,
        bucket_s: float = 1.0,
        buckets: int = 128,
    ) -> None:
        """``lengths`` is the caller's, who feeds it."""
        self._prediction = prediction
        self._lengths = lengths or AnswerLengths()
        self._bucket_s = bucket_s
        self._buckets = buckets
        # a column for each worker that was ever placed at; the first is of all others
        self._table = np.zeros((4, buckets, 16))
        self._column = np.zeros(16, dtype=np.int64)
        self._columns = 1
        self._now = 0
        self._entries: dict[Hashable, _Entry] = {}

    def __len__(self) -> int:
        """Requests that are counted."""
        return len(self._entries)

    def advance(self, now_s: float) -> None:
        """Time has passed: what is over makes room for what comes."""
        now = int(now_s / self._bucket_s)
        passed = min(now - self._now, self._buckets)
        if passed > 0:
            over = np.arange(now - passed, now) % self._buckets
            self._table[:, over] = 0.0
            self._now = now
            self._forget()

    def place(self, name: Hashable, stay: Stay, now_s: float) -> None:
        """Count a request, in place of what was known under this name."""
        if self._prediction is Prediction.OFF:
            return
        self.remove(name, now_s)
        self.advance(now_s)
        first = max(self._now, int(stay.start_s / self._bucket_s))
        first = min(first, self._now + self._buckets - 1)
        left = self._now + self._buckets - first
        share = self._share(stay, left)
        kv_tokens = max(0.0, stay.kv_tokens)
        column = self._own_column(stay.worker)
        entry = _Entry(column, self._now, first, share, kv_tokens)
        self._entries[name] = entry
        self._count(entry, 1.0)

    def remove(self, name: Hashable, now_s: float) -> None:
        """The request has ended, or went elsewhere."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.advance(now_s)
            self._count(entry, -1.0)

    def clear_worker(self, worker: int) -> None:
        """That number means another worker from now on."""
        column = int(self._columns_of(np.array([worker]))[0])
        if not column:
            return
        self._table[:, :, column] = 0.0
        gone = [name for name, e in self._entries.items() if e.column == column]
        for name in gone:
            del self._entries[name]

    def coming(
        self, workers: Ints, now_s: float, start_s: float, life_s: float = 0.0
    ) -> Coming:
        """The change at ``start_s``, or its mean over ``life_s`` from then on."""
        self.advance(now_s)
        now = self._now % self._buckets
        first = max(0, int(start_s / self._bucket_s) - self._now)
        last = max(first, int((start_s + life_s) / self._bucket_s) - self._now)
        first, last = min(first, self._buckets - 1), min(last, self._buckets - 1)
        ahead, *rest = self._when(self._now + first, last + 1 - first)
        then: Floats = self._table[:2, ahead].sum(axis=1)
        for after in rest:
            # one by one, so that the sum does not hang on where the table goes round
            for at in range(after.stop):
                then += self._table[:2, at]
        then /= last + 1 - first
        then -= self._table[:2, now]
        then -= self._table[2:, now]
        change = then.take(self._columns_of(workers), axis=1, mode="clip")
        return Coming(change[0], change[1])

    def calm_ms(self, workers: Ints, now_s: float, share: float) -> float | None:
        """When the mean batch of these workers will be ``share`` of what it is now.

        None if that isn't in sight.
        """
        self.advance(now_s)
        if not workers.size:
            return None
        when = (self._now + np.arange(self._buckets)) % self._buckets
        mean = self._table[0, when][:, self._columns_of(workers)].mean(axis=1)
        low = np.flatnonzero(mean <= mean[0] * share + 1e-9)
        return float(low[0]) * self._bucket_s * 1000 if low.size else None

    def _share(self, stay: Stay, left: int) -> Floats:
        """How much of the request is still there in each bucket from its first on.

        Up to the bucket in which even the longest answer is over.
        """
        tbt_ms = max(stay.tbt_ms, 1e-3)
        tokens = np.arange(left, dtype=np.float64) * (self._bucket_s * 1000 / tbt_ms)
        limit = max(0.0, stay.max_new_tokens)
        if self._prediction is Prediction.UNIFORM:
            limit = min(self._lengths.mean_tokens, limit)
        tokens = tokens[: tokens.searchsorted(limit)]
        if self._prediction is Prediction.UNIFORM:
            return np.ones(len(tokens))
        return self._lengths.surviving(tokens)

    def _forget(self) -> None:
        """Entries all of whose time is over; the first placed are the first to be."""
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if entry.placed + self._buckets > self._now:
                break
            del self._entries[name]

    def _count(self, entry: _Entry, sign: float) -> None:
        skip = max(0, self._now - entry.first)
        share = sign * entry.share[skip:]
        own = self._table[:, :, entry.column]
        at = 0
        for when in self._when(entry.first + skip, len(share)):
            part = share[at : at + when.stop - when.start]
            own[0, when] += part
            own[1, when] += part * entry.kv_tokens
            at += len(part)
        begin = max(self._now, entry.placed)
        for before in self._when(begin, entry.first - begin):
            own[2, before] += sign
            own[3, before] += sign * entry.kv_tokens

    def _when(self, first: int, count: int) -> Iterator[slice]:
        """Where so many buckets are in the table, which goes round; in order."""
        if count <= 0:
            return
        start = first % self._buckets
        end = start + count
        yield slice(start, min(end, self._buckets))
        if end > self._buckets:
            yield slice(0, end - self._buckets)

    def _columns_of(self, workers: Ints) -> Ints:
        """Each worker's column; that of all others where nothing was placed."""
        if workers.size:
            self._know(int(workers.max()))
        return self._column.take(workers)

    def _own_column(self, worker: int) -> int:
        self._know(worker)
        column = int(self._column[worker])
        if not column:
            column = self._column[worker] = self._columns
            self._columns += 1
            more = self._table.shape[2]
            if column >= more:
                self._table = np.pad(self._table, ((0, 0), (0, 0), (0, more)))
        return column

    def _know(self, worker: int) -> None:
        size = len(self._column)
        if worker >= size:
            more = max(worker + 1, 2 * size) - size
            self._column = np.pad(self._column, (0, more))
