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
        tbt_ms = _plain_ms(workers, running, seeds)
        if not unfitted.all():
            rows = np.maximum(0.0, running + workers.ahead) + 1
            kv_tokens = np.maximum(0.0, workers.kv_tokens + workers.coming_kv_tokens)
            fitted_ms = (
                workers.fixed_ms
                + workers.row_ms * rows
                + workers.pair_ms * (kv_tokens + ask.prompt_tokens)
            )
            tbt_ms = np.where(unfitted, tbt_ms, fitted_ms)
        limited = workers.capacity > 0
        full = limited & (workers.kv_tokens + ask.reserved_tokens > workers.capacity)
        answer_ms = (ask.answer_tokens or seeds.answer_tokens) * tbt_ms
        turns_ms = (workers.waiting + 1) * answer_ms
        wait_ms = np.where(full, turns_ms / np.maximum(1, workers.running), 0.0)
        fits = ~limited | (workers.capacity >= ask.reserved_tokens)
        return cls(fits, wait_ms, tbt_ms)

    def least(self, workers: DecodeColumns) -> int:
        """The one with the shortest wait, then pace, then share of memory used."""
        used = np.where(
            workers.capacity > 0,
            workers.kv_tokens / np.maximum(workers.capacity, 1),
            0.0,
        )
        left = np.flatnonzero(self.fits)
        for column in (self.wait_ms, self.tbt_ms, used, workers.kv_tokens):
            values = column[left]
            left = left[values == values.min()]
            if len(left) == 1:
                break
        return int(left[0])


def _plain_ms(workers: DecodeColumns, running: Floats, seeds: CostSeeds) -> Floats:
    """The pace where no curve was fitted."""
    share = (workers.ahead + 1) / np.maximum(running, 1e-300)
    share = np.where(running > 0, share, workers.ahead)
    step_ms = np.where(workers.step_ms > 0, workers.step_ms, seeds.step_ms)
    return step_ms * (1 + seeds.join_share * share)


def best_by_host(host: Ints, pace: Floats, hosts: int) -> Ints:
    """The worker with the least ``pace`` on each host, the first of equals; -1 for none."""
    best = np.full(hosts, -1, dtype=np.int64)
    # of equals the first must be written last
    order = np.argsort(pace, kind="stable")[::-1]
    order = order[np.isfinite(pace[order])]
    best[host[order]] = order
    return best
