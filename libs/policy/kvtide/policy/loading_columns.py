"""What loading a prefix costs each of many workers: ``cost.CostModel`` in columns.

Matrices have a row for each run of blocks and a column for each loader.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.policy.columns import NO_HOST, Flags, Floats, Holdings, Ints
from kvtide.policy.curves import CostSeeds
from kvtide.policy.spreading import Option
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


class HeldRuns:
    """A prompt's reusable blocks in runs that the same hosts hold, equally quick to read.

    A place is a host that holds any of them, by number; the last place is that of all
    hosts that hold nothing.
    """

    def __init__(
        self, ask: Ask, holdings: Holdings, outflows: Floats, seeds: CostSeeds
    ) -> None:
        """Of one request."""
        self._holdings = holdings
        self._block_bytes = ask.block_bytes
        self._overhead_ms = seeds.block_overhead_ms
        slows = _slowness(seeds)
        usable = min(holdings.blocks, ask.full_blocks)
        self._rows = np.flatnonzero(holdings.block < usable)
        block, host = holdings.block[self._rows], holdings.host[self._rows]
        self._grade = holdings.ssd[self._rows] + 2 * holdings.hint[self._rows]
        holds = np.zeros(len(outflows), dtype=bool)
        holds[host] = True
        hosts = np.flatnonzero(holds)
        self._place = np.full(len(outflows), len(hosts), dtype=np.int64)
        self._place[hosts] = np.arange(len(hosts))
        grades = np.full((usable, len(hosts)), _NONE, dtype=np.uint8)
        # the quickest last, for it is the one that stays
        order = np.argsort(-slows[self._grade], kind="stable")
        grades[block[order], self._place[host[order]]] = self._grade[order]
        starts, self.counts = _runs(grades)
        self.ends = np.array([*starts, sum(self.counts)], dtype=np.int64)
        self._flows = 1 + outflows[hosts]
        self._slows = slows
        self._slow = np.full((len(starts), len(hosts) + 1), np.inf)
        self._slow[:, :-1] = slows[grades[starts]]
        self._rate = np.zeros_like(self._slow)
        self._rate[:, :-1] = 1 / (self._slow[:, :-1] * self._flows)
        self._total = self._rate.sum(axis=1)[:, None]

    def __len__(self) -> int:
        """Runs."""
        return len(self.counts)

    def places(self, host: Ints) -> Ints:
        """Each host's place. One without a name shares memory with nobody."""
        places = self._place.take(host)
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

    def options(
        self, own: int, near: Flags, only: int | None, blocks: int
    ) -> list[list[Option[int]]]:
        """The copies (rows of the holdings) that each of the first blocks may be read from.

        ``near`` says of each run whether it is read from the place ``own``, else from
        all others, or from the place ``only`` alone.
        """
        rows = self._rows[self._holdings.block[self._rows] < blocks]
        run = np.searchsorted(self.ends, self._holdings.block[rows], side="right") - 1
        place = self._place[self._holdings.host[rows]]
        grade = self._holdings.ssd[rows] + 2 * self._holdings.hint[rows]
        local = place == own
        far = ~local if only is None else place == only
        fits = (near[run] & local) | (~near[run] & far)
        quickest = self._slows[grade] <= self._slow[run, place]
        found: list[dict[int, Option[int]]] = [{} for _ in range(blocks)]
        for at in np.flatnonzero(fits & quickest):
            host, row = int(place[at]), int(rows[at])
            cost = float(self._slows[grade[at]] * self._flows[host])
            options = found[int(self._holdings.block[row])]
            options.setdefault(host, Option(host, cost, row))
        return [[each[host] for host in sorted(each)] for each in found]

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
