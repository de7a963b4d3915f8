"""Deletions that a running store was not told of: read in the catalog, now and then.

Whoever deletes a tenant tells the stores that it hears. One that is cut off from the
bus meanwhile, and not so long that it begins a new life, finds out here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import structlog

from kvtide.bus.messages import BlocksDone, BlockSelector, Message, RemoveBlocks
from kvtide.catalog import CatalogError
from kvtide.kv import BlockKey
from kvtide.runtime import Clock
from kvtide.store.ssd.events import DeletedSpace, Tombstone
from kvtide.store.tombstones import Read

log = structlog.get_logger("kvtide.store")

LOOK_S = 1.0
"""How often it is looked whether the bus is back."""

SKEW_S = 60.0
"""Clocks of hosts differ by less: what was deleted so long before the start counts."""

OVERLAP_S = 3600.0
"""A deletion may be written so long after the time that it bears, or its clock be so late."""

Ask = Callable[[float], Sequence[Tombstone]]
"""Deletions of then, in seconds of wall clock, or later; called in a thread, may raise."""

Remove = Callable[[RemoveBlocks], Awaitable[Message | None]]
"""Has the store remove a page of blocks."""


@dataclass(slots=True)
class DeletionBook:
    """Which deletions a store has yet to carry out. Pure."""

    floor_ms: int
    """Older ones are of no concern."""
    newest_ms: int = 0
    _done_ms: dict[BlockSelector, int] = field(default_factory=dict[BlockSelector, int])

    @classmethod
    def at(cls, start_s: float, first: Read | None) -> Self:
        """Of a life that began then (wall clock), with what its SSD was opened by.

        What is in there concerns only blocks of before, which are gone: DRAM was empty,
        and the SSD's were left out. Carried out again it would take newer ones. Without
        an SSD (None) what is old concerns nothing that is here.
        """
        if first is None:
            return cls(round((start_s - SKEW_S) * 1e3))
        book = cls(round((start_s - OVERLAP_S) * 1e3) if first.whole else 0)
        for each in first.known:
            book.done(each)
        return book

    @property
    def since_s(self) -> float:
        """From when on to ask."""
        return max(self.floor_ms / 1e3, self.newest_ms / 1e3 - OVERLAP_S)

    def news(
        self, found: Sequence[Tombstone], told: Callable[[Tombstone], bool]
    ) -> list[Tombstone]:
        """Those that are neither done nor ``told`` over the bus, the earliest first."""
        new = [
            each
            for each in found
            if each.until_ms >= self.floor_ms
            and each.until_ms > self._done_ms.get(selector(each), -1)
            and not told(each)
        ]
        return sorted(new, key=lambda each: each.until_ms)

    def done(self, tombstone: Tombstone) -> None:
        """It need not be done again."""
        select = selector(tombstone)
        self._done_ms[select] = max(self._done_ms.get(select, 0), tombstone.until_ms)

    def read(self, found: Sequence[Tombstone]) -> None:
        """All of these are done or were told: what is much older is not asked again."""
        self.newest_ms = max([self.newest_ms, *(each.until_ms for each in found)])
        since_ms = self.since_s * 1e3
        self._done_ms = {k: ms for k, ms in self._done_ms.items() if ms >= since_ms}


def selector(tombstone: Tombstone) -> BlockSelector:
    """Which blocks are meant."""
    if isinstance(tombstone, DeletedSpace):
        return BlockSelector(tenant=tombstone.tenant, model=tombstone.model)
    return BlockSelector(keys=(tombstone.key,))


class DeletionWatch:
    """Asks each ``every_s`` seconds, and at once when the bus is back."""

    def __init__(
        self,
        ask: Ask,
        remove: Remove,
        clock: Clock,
        *,
        book: DeletionBook,
        every_s: float,
    ) -> None:
        """Nothing is asked before ``run``."""
        self._ask = ask
        self._remove = remove
        self._clock = clock
        self._every_s = every_s
        self._book = book

    async def run(
        self, told: Callable[[Tombstone], bool], connected: Callable[[], bool]
    ) -> None:
        """For as long as the store runs. Ends by being cancelled."""
        while True:
            await self._look(told)
            due_s = self._clock.monotonic() + self._every_s
            was = connected()
            while self._clock.monotonic() < due_s:
                await self._clock.sleep(min(LOOK_S, self._every_s))
                back, was = connected() and not was, connected()
                if back:
                    break

    async def _look(self, told: Callable[[Tombstone], bool]) -> None:
        try:
            found = await asyncio.to_thread(self._ask, self._book.since_s)
        except (CatalogError, TimeoutError, OSError) as error:
            log.warning("deletions_not_read", why=str(error), again_s=self._every_s)
            return
        new = self._book.news(found, told)
        for tombstone in new:
            if not await self._carry_out(selector(tombstone)):
                return  # again at the next look
            self._book.done(tombstone)
        self._book.read(found)

    async def _carry_out(self, select: BlockSelector) -> bool:
        count, after = 0, None
        while True:
            after_key: BlockKey | None = after
            answer = await self._remove(RemoveBlocks(select=select, after=after_key))
            if not isinstance(answer, BlocksDone):
                return False
            count, after = count + answer.changed, answer.next_key
            if after is None:
                log.info("late_deletion_done", blocks=count)
                return True
            await asyncio.sleep(0)  # others' turn
