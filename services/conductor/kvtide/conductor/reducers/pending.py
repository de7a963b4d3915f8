"""Blocks that prefill workers will have computed soon, for requests placed before.

They are not in the index yet, but a request for the same prefix that goes to the same
worker waits for them there instead of computing them again. Known of this conductor's own
placements alone: what shares a prefix is mostly of one tenant, whose conductor is one.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.kv import BlockKey, NodeId, RequestId

_S_TO_MS = 1000.0
_GRACE_S = 2.0
_MOST_S = 600.0


@dataclass(frozen=True, slots=True)
class Pending:
    """So many blocks are on their way at a worker, the last of them done in ``ms``."""

    blocks: int
    ms: float


@dataclass(frozen=True, slots=True)
class _Work:
    """The blocks of one request that no earlier one makes at the same worker."""

    node: NodeId
    keys: tuple[BlockKey, ...]
    done_s: float
    gone_s: float


class PendingBlocks:
    """Who is making which block, first come first. Bounded in number and age.

    A block is believed until its request ends, or twice as long (and two seconds) as it
    was predicted to take: by then the index has it, or it never came.
    """

    def __init__(self, limit: int) -> None:
        """Nothing is being made; at most ``limit`` blocks are followed."""
        self._limit = limit
        self._makers: dict[BlockKey, dict[NodeId, _Work]] = {}
        self._works: dict[RequestId, _Work] = {}
        self._ends: list[tuple[float, RequestId]] = []
        self._blocks = 0

    def __len__(self) -> int:
        """Blocks that are followed, each at each worker."""
        return self._blocks

    def add(
        self,
        request: RequestId,
        node: NodeId,
        keys: Sequence[BlockKey],
        now_s: float,
        done_s: float,
    ) -> None:
        """A request that was placed at ``node`` has these blocks made, by ``done_s``."""
        self.remove(request)
        self.tick(now_s)
        makers = self._makers
        own = tuple([key for key in keys if node not in makers.get(key, ())])
        if not own or self._blocks + len(own) > self._limit:
            return
        gone_s = min(2 * done_s - now_s + _GRACE_S, now_s + _MOST_S)
        work = _Work(node, own, done_s, gone_s)
        for key in own:
            makers.setdefault(key, {})[node] = work
        self._blocks += len(own)
        self._works[request] = work
        heapq.heappush(self._ends, (work.gone_s, request))

    def remove(self, request: RequestId) -> None:
        """The request has ended, or is about to be placed anew."""
        work = self._works.pop(request, None)
        if work is None:
            return
        for key in work.keys:
            makers = self._makers[key]
            del makers[work.node]
            if not makers:
                del self._makers[key]
        self._blocks -= len(work.keys)

    def worker_gone(self, node: NodeId) -> None:
        """What was being made there never comes."""
        gone = [name for name, work in self._works.items() if work.node == node]
        for request in gone:
            self.remove(request)

    def after(
        self, keys: Sequence[BlockKey], held: int, now_s: float
    ) -> dict[NodeId, Pending]:
        """Which workers make the blocks that follow the first ``held``, without a hole."""
        found: dict[NodeId, Pending] = {}
        if held >= len(keys) or keys[held] not in self._makers:
            return found
        self.tick(now_s)
        for node in tuple(self._makers.get(keys[held], ())):
            blocks, done_s = 0, now_s
            for key in keys[held:]:
                work = self._makers.get(key, {}).get(node)
                if work is None:
                    break
                blocks += 1
                done_s = max(done_s, work.done_s)
            found[node] = Pending(blocks, (done_s - now_s) * _S_TO_MS)
        return found

    def tick(self, now_s: float) -> None:
        """Time has passed: let go of what is too old."""
        while self._ends and self._ends[0][0] <= now_s:
            gone_s, request = heapq.heappop(self._ends)
            work = self._works.get(request)
            if work is not None and work.gone_s == gone_s:
                self.remove(request)

    def clear(self) -> None:
        """Forget all."""
        self._makers.clear()
        self._works.clear()
        self._ends.clear()
        self._blocks = 0
