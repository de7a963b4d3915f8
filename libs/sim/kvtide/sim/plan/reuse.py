"""What of a workload comes again, and how far apart. Exact, in one pass."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.sim.perf.workload import SimRequest


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of blocks that come again: how many different ones, and seconds, lie between.

    A least-recently-used pool of ``distance`` blocks just has the block. ``looked_up``
    counts all blocks of all prompts, ``prompt_tokens`` and ``answer_tokens`` are means.
    """

    requests: int
    looked_up: int
    different: int
    prompt_tokens: float
    answer_tokens: float
    reused_tokens: float
    used_once: float
    distance: np.ndarray
    seconds: np.ndarray

    @property
    def most(self) -> float:
        """The share of blocks that an unlimited pool has."""
        return len(self.distance) / max(1, self.looked_up)

    def hit_rate(self, blocks: float) -> float:
        """The share that a least-recently-used pool of so many blocks has."""
        return float((self.distance < blocks).sum()) / max(1, self.looked_up)


def reuse_of(requests: Sequence[SimRequest], block_tokens: int) -> Reuse:
    """Measure a workload."""
    looked_up = sum(len(request.blocks) for request in requests)
    tree, last = _Tree(looked_up + 1), dict[int, int]()
    when: dict[int, float] = {}
    distance: list[int] = []
    seconds: list[float] = []
    place, reused = 0, 0
    for request in requests:
        known = 0
        for block in request.blocks:
            before = last.get(block)
            if before is not None:
                distance.append(tree.after(before))
                seconds.append(request.at_s - when[block])
                tree.add(before, -1)
                known += 1
            tree.add(place, 1)
            last[block], when[block] = place, request.at_s
            place += 1
        reused += known
    count = max(1, len(requests))
    with_reuse = max(1, sum(1 for each in requests if each.blocks))
    uses = Counter(block for request in requests for block in request.blocks)
    return Reuse(
        requests=len(requests),
        looked_up=looked_up,
        different=len(last),
        prompt_tokens=sum(each.prompt_tokens for each in requests) / count,
        answer_tokens=sum(each.output_tokens for each in requests) / count,
        reused_tokens=reused * block_tokens / with_reuse,
        used_once=sum(n == 1 for n in uses.values()) / max(1, len(uses)),
        distance=np.array(distance, dtype=np.int64),
        seconds=np.array(seconds),
    )


class _Tree:
    """Counts by place, summed in logarithmic time (Fenwick)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self._total = 0

    def add(self, place: int, change: int) -> None:
        self._total += change
        place += 1
        while place < len(self._sums):
            self._sums[place] += change
            place += place & -place

    def after(self, place: int) -> int:
        """The sum of all places behind this one."""
        place += 1
        before = 0
        while place:
            before += self._sums[place]
            place -= place & -place
        return self._total - before
