"""The hottest prefixes: a tree of block keys with the heat of their reuse. Pure.

Fed with the keys of reused prefixes, front to back, as conductors gossip them. Heat is
the number of reuses, halved every ``half_life_s``.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from itertools import count

import msgspec

from kvtide.kv import BlockKey, TenantId

KEPT_BLOCKS = 20_000
HALF_LIFE_S = 600.0
_KEEP_SHARE = 0.8


class ChainView(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks that are always reused together; ``parent`` is an index or -1."""

    parent: int
    depth_blocks: int
    blocks: int
    heat: float
    tenant: str
    first_key: str
    last_key: str


@dataclass(slots=True)
class _Block:
    key: BlockKey
    tenant: TenantId
    depth: int
    heat: float = 0.0
    heated_s: float = 0.0
    children: dict[BlockKey, "_Block"] = field(default_factory=dict[BlockKey, "_Block"])

    def warm(self, now_s: float, half_life_s: float) -> float:
        """The heat at this moment."""
        return self.heat * 0.5 ** ((now_s - self.heated_s) / half_life_s)


class Chains:
    """The tree of reused prefixes, of bounded size."""

    def __init__(
        self, *, kept: int = KEPT_BLOCKS, half_life_s: float = HALF_LIFE_S
    ) -> None:
        """Empty."""
        self._roots: dict[BlockKey, _Block] = {}
        self._kept = kept
        self._half_life_s = half_life_s
        self._count = 0

    def __len__(self) -> int:
        """Blocks in the tree."""
        return self._count

    def reused(
        self, tenant: TenantId, keys: tuple[BlockKey, ...], now_s: float
    ) -> None:
        """A prefix was reused: each of its blocks gets warmer."""
        level = self._roots
        for depth, key in enumerate(keys):
            block = level.get(key)
            if block is None:
                block = level[key] = _Block(key, tenant, depth)
                self._count += 1
            block.heat = block.warm(now_s, self._half_life_s) + 1
            block.heated_s = now_s
            level = block.children
        if self._count > self._kept:
            self._forget(now_s)

    def hottest(self, now_s: float, limit: int) -> list[ChainView]:
        """At most ``limit`` runs, each after its parent, hotter ones first."""
        found: list[ChainView] = []
        numbers = count()
        waiting: list[tuple[float, int, int, _Block]] = []

        def wait(parent: int, block: _Block) -> None:
            heat = block.warm(now_s, self._half_life_s)
            heappush(waiting, (-heat, next(numbers), parent, block))

        # a block is never hotter than what it hangs below: cold roots can't come up
        for block in nlargest(
            limit, self._roots.values(), key=lambda b: b.warm(now_s, self._half_life_s)
        ):
            wait(-1, block)
        while waiting and len(found) < limit:
            cold, _, parent, first = heappop(waiting)
            last, heat = first, -cold
            while len(last.children) == 1:
                (below,) = last.children.values()
                if below.warm(now_s, self._half_life_s) < heat / 2:
                    break
                last = below
            found.append(
                ChainView(
                    parent=parent,
                    depth_blocks=first.depth,
                    blocks=last.depth - first.depth + 1,
                    heat=round(heat, 2),
                    tenant=first.tenant,
                    first_key=first.key.hex(),
                    last_key=last.key.hex(),
                )
            )
            index = len(found) - 1
            for block in last.children.values():
                wait(index, block)
        return found

    def _forget(self, now_s: float) -> None:
        """Drop the coldest; a block is never colder than what hangs below it."""
        heats: list[float] = []
        waiting = list(self._roots.values())
        while waiting:
            block = waiting.pop()
            heats.append(block.warm(now_s, self._half_life_s))
            waiting.extend(block.children.values())
        heats.sort(reverse=True)
        floor = heats[int(self._kept * _KEEP_SHARE)]
        self._count = _prune(self._roots, floor, now_s, self._half_life_s)


def _prune(
    roots: dict[BlockKey, _Block], floor: float, now_s: float, half_life_s: float
) -> int:
    """Keep blocks hotter than ``floor``; how many are left."""
    left = 0
    waiting = [roots]
    while waiting:
        level = waiting.pop()
        for key, block in list(level.items()):
            if block.warm(now_s, half_life_s) <= floor:
                del level[key]
            else:
                left += 1
                waiting.append(block.children)
    return left
