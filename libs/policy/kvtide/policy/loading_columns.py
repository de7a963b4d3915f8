"""What loading a prefix costs each of many workers: ``cost.CostModel`` in columns.

Matrices have a row for each run of blocks and a column for each loader.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.policy.columns import NO_HOST, Flags, Floats, Holdings, Ints
from kvtide.policy.curves import CostSeeds
from kvtide.policy.views import Ask

_LEAST_RATE = 1e-300
_NONE = 4
"""The grade of what isn't there. Grades below: bit 0 is SSD, bit 1 is a hint."""


@dataclass(frozen=True, slots=True)
class LoaderColumns:
    """Who may load: prefill workers, and perhaps decode itself in the last row."""

    host: Ints
    inflows: Floats
    fixed_ms: Floats
    token_ms: Floats
    pair_ms: Floats
    load_fixed_ms: Floats
    near_byte_ms: Floats
    far_byte_ms: Floats

    def compute_ms(self, new: Ints, reused: Ints) -> Floats:
        """``PrefillCurve.ms`` of so many tokens at each: of shapes that go together."""
        pairs = new * (new + 2 * reused + 1) / 2
        found = new * self.token_ms
        found += pairs * self.pair_ms
        found += np.where(new > 0, self.fixed_ms, 0.0)
        return found


class HeldRuns:
    """A prompt's reusable blocks in runs that the same hosts hold, equally quick to read.

    A place is a host that holds any of them, by number; the last place is that of all
    hosts that hold nothing.
    """

    def __init__(
        self, ask: Ask, holdings: Holdings, outflows: Floats, seeds: CostSeeds
    ) -> None:
        """Of one request."""
        self._block_bytes = ask.block_bytes
        self._overhead_ms = seeds.block_overhead_ms
        self._slows = slows = _slowness(seeds)
        usable = min(holdings.blocks, ask.full_blocks)
        # by block, so that those of the first ones are the first
        count = len(holdings.block)
        if usable < holdings.blocks:
            count = int(holdings.block.searchsorted(usable))
        self._block, host = holdings.block[:count], holdings.host[:count]
        self._grade = holdings.ssd[:count] + 2 * holdings.hint[:count].view(np.uint8)
        holds = np.zeros(len(outflows), dtype=bool)
        holds[host] = True
        hosts = holds.nonzero()[0]
        self._place_of = np.empty(len(outflows), dtype=np.int64)
        self._place_of.fill(len(hosts))
        self._place_of[hosts] = np.arange(len(hosts))
        self._place = self._place_of.take(host)
        grades = self._grades(usable, len(hosts))
        starts, self.counts = _runs(grades)
        self.ends = np.array([*starts, sum(self.counts)], dtype=np.int64)
        self._flows = 1 + outflows.take(hosts)
        self._slow = np.empty((len(starts), len(hosts) + 1))
        self._slow[:, :-1] = slows.take(grades[starts])
        self._slow[:, -1] = np.inf
        self._rate = np.zeros_like(self._slow)
        np.divide(1, self._slow[:, :-1] * self._flows, out=self._rate[:, :-1])
        self._total = self._rate.sum(axis=1)[:, None]

    def _grades(self, blocks: int, hosts: int) -> NDArray[np.uint8]:
        """The quickest grade of each block on each host."""
        grades = np.empty(blocks * hosts, dtype=np.uint8)
        grades.fill(_NONE)
        cell = self._block * hosts
        cell += self._place
        if self._grade.any():
            there = np.bincount(self._grade, minlength=_NONE).nonzero()[0]
            # the quickest last, for it is the one that stays
            for grade in sorted(there.tolist(), key=lambda each: -self._slows[each]):
                own = slice(None) if len(there) == 1 else self._grade == grade
                grades[cell[own]] = grade
        else:
            grades[cell] = 0
        return grades.reshape(blocks, hosts)

    def __len__(self) -> int:
        """Runs."""
        return len(self.counts)

    def places(self, host: Ints) -> Ints:
        """Each host's place. One without a name shares memory with nobody."""
        places = self._place_of.take(host)
        places[host == NO_HOST] = self._slow.shape[1] - 1
        return places

    def near_ms(self, loaders: LoaderColumns, places: Ints) -> Floats:
        """One block of each run from the loader's own host."""
        slow = self._slow.take(places, axis=1)
        slow *= loaders.near_byte_ms
        return self._block_ms(slow)

    def far_ms(self, loaders: LoaderColumns, places: Ints) -> Floats:
        """One block of each run from all other hosts that hold it, at once."""
        rate = self._rate.take(places, axis=1)
        np.subtract(self._total, rate, out=rate)
        # what is left of a sum that had only one part is nothing
        np.maximum(rate, _LEAST_RATE, out=rate)
        rate[rate < self._total * 1e-12] = _LEAST_RATE
        np.reciprocal(rate, out=rate)
        np.maximum(rate, 1 + loaders.inflows, out=rate)
        rate *= loaders.far_byte_ms
        return self._block_ms(rate)

    def all_ms(self, loaders: LoaderColumns, near: Flags) -> Floats:
        """All runs, each from the loader's own host where ``near``, else from the others."""
        load_ms = loaders.load_fixed_ms.copy()
        places = self.places(loaders.host)
        loads_ms = np.where(
            near, self.near_ms(loaders, places), self.far_ms(loaders, places)
        )
        for run, count in enumerate(self.counts):
            load_ms += loads_ms[run] * count
        return load_ms

    def pending_ms(self, loaders: LoaderColumns) -> Floats:
        """One block from the loader's own memory."""
        return self._block_ms(loaders.near_byte_ms.copy())

    def from_ms(self, loaders: LoaderColumns, place: int) -> Floats:
        """One block of each run from one other host; for ever where it has it not."""
        with np.errstate(divide="ignore"):
            alone = 1 / self._rate[:, place]
        shared = np.maximum(1 + loaders.inflows, alone[:, None])
        return self._block_ms(loaders.far_byte_ms * shared)

    def held(self, places: Ints) -> Ints:
        """How many of the first runs each place holds."""
        there = np.isfinite(self._slow[:, places])
        return np.logical_and.accumulate(there, axis=0).sum(axis=0, dtype=np.int64)

    def longest(self) -> int | None:
        """The place with the longest prefix, the first of equals."""
        if not len(self):
            return None
        places = np.arange(len(self._flows), dtype=np.int64)
        return int(np.argmax(self.held(places)))

    def spread(self, own: int, near: Flags, only: int | None, blocks: int) -> list[int]:
        """The copy (a row of the holdings) that each of the first blocks is read from.

        ``near`` says of each run whether it is read from the place ``own``, else from
        all others, or from the place ``only`` alone. As ``spreading.spread``; within a
        run every block has the same choice.
        """
        used = np.zeros(len(self._flows))
        bounds = self._block.searchsorted(np.arange(blocks + 1)).tolist()
        chosen: list[int] = []
        for run, count in enumerate(self.counts):
            hosts = self._sources(run, own, near, only)
            costs = self._slow[run].take(hosts) * self._flows.take(hosts)
            left = used.take(hosts)
            best = 0
            for _ in range(min(count, blocks - len(chosen))):
                if len(hosts) > 1:
                    best = int((left + costs).argmin())
                left[best] += costs[best]
                first, end = bounds[len(chosen)], bounds[len(chosen) + 1]
                chosen.append(self._row(first, end, int(hosts[best]), run))
            used[hosts] = left
        return chosen

    def _sources(self, run: int, own: int, near: Flags, only: int | None) -> Ints:
        """The places that a run is read from, by number."""
        if near[run]:
            return np.array([own], dtype=np.int64)
        if only is not None:
            return np.array([only], dtype=np.int64)
        there = np.isfinite(self._slow[run, :-1])
        if own < len(there):
            there[own] = False
        return there.nonzero()[0]

    def _row(self, first: int, end: int, place: int, run: int) -> int:
        """The first of the block's copies at a place that is as quick as the run."""
        here = self._place[first:end] == place
        here &= self._slows.take(self._grade[first:end]) <= self._slow[run, place]
        return first + int(here.argmax())

    def _block_ms(self, byte_ms: Floats) -> Floats:
        byte_ms *= self._block_bytes
        byte_ms += self._overhead_ms
        return byte_ms


def _slowness(seeds: CostSeeds) -> Floats:
    """By how much longer each grade takes to read."""
    ssd, hint = 1 / seeds.ssd_share, 1 / seeds.hint_share
    return np.array([1.0, ssd, hint, ssd * hint, np.inf])


def _runs(grades: NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """Where runs of equal rows start and how long they are, up to a row of nothing."""
    held = (grades != _NONE).any(axis=1)
    usable = len(held) if held.all() else int(np.argmin(held))
    if not usable:
        return [], []
    changes = (grades[1:usable] != grades[: usable - 1]).any(axis=1)
    starts = [0, *(changes.nonzero()[0] + 1).tolist()]
    ends = [*starts[1:], usable]
    return starts, [end - start for start, end in zip(starts, ends, strict=True)]
