"""What decoding a request costs at each of many workers."""

from dataclasses import dataclass

import numpy as np

from kvtide.policy.columns import DecodeColumns, Flags, Floats, Ints
from kvtide.policy.curves import CostSeeds
from kvtide.policy.views import Ask


@dataclass(frozen=True, slots=True)
class DecodeScores:
    """``cost.CostModel.decode_cost`` in columns; ``fits``: it could ever be held there."""

    fits: Flags
    wait_ms: Floats
    tbt_ms: Floats

    @classmethod
    def of(cls, ask: Ask, workers: DecodeColumns, seeds: CostSeeds) -> "DecodeScores":
        """For one request at each worker."""
        running = np.maximum(0.0, workers.running + workers.coming)
        unfitted = np.isnan(workers.fixed_ms)
        if unfitted.all():
            tbt_ms = _plain_ms(workers, running, seeds)
        else:
            tbt_ms = _fitted_ms(ask, workers, running)
            if unfitted.any():
                plain_ms = _plain_ms(workers, running, seeds)
                tbt_ms = np.where(unfitted, plain_ms, tbt_ms)
        limited = workers.capacity > 0
        full = limited & (workers.kv_tokens + ask.reserved_tokens > workers.capacity)
        wait_ms = np.zeros(len(full))
        if full.any():
            answer_ms = (ask.answer_tokens or seeds.answer_tokens) * tbt_ms
            turns_ms = (workers.waiting + 1) * answer_ms
            wait_ms = np.where(full, turns_ms / np.maximum(1, workers.running), 0.0)
        fits = ~limited | (workers.capacity >= ask.reserved_tokens)
        return cls(fits, wait_ms, tbt_ms)

    def least(self, workers: DecodeColumns) -> int:
        """The one with the shortest wait, then pace, then share of memory used."""
        left = self.fits.nonzero()[0]
        for column in (self.wait_ms, self.tbt_ms):
            values = column.take(left)
            left = left[values == values.min()]
            if len(left) == 1:
                return int(left[0])
        kv_tokens, capacity = workers.kv_tokens.take(left), workers.capacity.take(left)
        used = np.where(capacity > 0, kv_tokens / np.maximum(capacity, 1), 0.0)
        # of equals the first
        return int(left[np.lexsort((kv_tokens, used))[0]])


def _fitted_ms(ask: Ask, workers: DecodeColumns, running: Floats) -> Floats:
    """The pace by the curves that were fitted; nan where there is none."""
    rows = np.maximum(0.0, running + workers.ahead) + 1
    kv_tokens = np.maximum(0.0, workers.kv_tokens + workers.coming_kv_tokens)
    return (
        workers.fixed_ms
        + workers.row_ms * rows
        + workers.pair_ms * (kv_tokens + ask.prompt_tokens)
    )


def _plain_ms(workers: DecodeColumns, running: Floats, seeds: CostSeeds) -> Floats:
    """The pace where no curve was fitted."""
    share = (workers.ahead + 1) / np.maximum(running, 1e-300)
    share = np.where(running > 0, share, workers.ahead)
    step_ms = np.where(workers.step_ms > 0, workers.step_ms, seeds.step_ms)
    return step_ms * (1 + seeds.join_share * share)


def best_by_host(host: Ints, pace: Floats, hosts: int) -> Ints:
    """The worker with the least ``pace`` on each host, the first of equals; -1 for none."""
    best, least = np.empty(hosts, dtype=np.int64), np.empty(hosts)
    best.fill(-1)
    least.fill(np.inf)
    np.fmin.at(least, host, pace)
    # of equals the first must be written last
    rows = ((pace == least.take(host)) & np.isfinite(pace)).nonzero()[0][::-1]
    best[host.take(rows)] = rows
    return best
