"""Loads that are on their way, by host that they come from and by worker they go to."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.kv import RequestId

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MOST = 100_000


@dataclass(frozen=True, slots=True, order=True)
class _Flow:
    end_s: float
    number: int
    request: RequestId
    worker: int
    hosts: tuple[int, ...]


class Flows:
    """Counts flows until they are predicted to have ended. Never negative, bounded."""

    def __init__(self) -> None:
        """Nothing is on its way."""
        self._out = np.zeros(16)
        self._into = np.zeros(16)
        self._open: list[_Flow] = []
        self._named: dict[RequestId, _Flow] = {}
        self._number = 0

    def add(
        self, request: RequestId, worker: int, hosts: Sequence[int], end_s: float
    ) -> None:
        """Blocks of a request are on their way from these hosts to a worker's row."""
        self.remove(request)
        if not hosts or len(self._open) >= _MOST:
            return
        self._number += 1
        where = tuple(sorted(set(hosts)))
        flow = _Flow(end_s, self._number, request, worker, where)
        heapq.heappush(self._open, flow)
        self._named[request] = flow
        self._count(flow, 1.0)

    def remove(self, request: RequestId) -> None:
        """The request has ended, or is about to be placed anew."""
        flow = self._named.pop(request, None)
        if flow is not None:
            self._count(flow, -1.0)

    def outflows(self, hosts: int, now_s: float) -> Floats:
        """From each host, of so many."""
        self._expire(now_s)
        self._out = _grown(self._out, hosts)
        return self._out[:hosts]

    def inflows(self, workers: Ints, now_s: float) -> Floats:
        """Into each worker."""
        self._expire(now_s)
        self._into = _grown(self._into, int(workers.max()) + 1 if workers.size else 0)
        return self._into[workers]

    def _expire(self, now_s: float) -> None:
        while self._open and self._open[0].end_s <= now_s:
            flow = heapq.heappop(self._open)
            if self._named.get(flow.request) is flow:
                self.remove(flow.request)

    def _count(self, flow: _Flow, sign: float) -> None:
        self._out = _grown(self._out, flow.hosts[-1] + 1)
        self._into = _grown(self._into, flow.worker + 1)
        for host in flow.hosts:
            self._out[host] += sign
        self._into[flow.worker] += sign


def _grown(column: Floats, size: int) -> Floats:
    if size <= len(column):
        return column
    return np.pad(column, (0, max(size, 2 * len(column)) - len(column)))
