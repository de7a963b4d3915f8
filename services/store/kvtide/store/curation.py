"""What people say of blocks: which are there, which to keep, which to forget. Pure.

Every answer looks at a bounded number of blocks: a listing of a million blocks never
holds up a read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import assert_never

from kvtide.bus.messages import (
    BlockListing,
    BlockPage,
    BlocksDone,
    BlockSelector,
    Failure,
    ListBlocks,
    PinBlocks,
    RemoveBlocks,
    UnpinBlocks,
)
from kvtide.kv import BlockKey, SpaceTags
from kvtide.store.curation_messages import CurationAnswer, CurationRequest
from kvtide.store.inventory import Inventory
from kvtide.store.ssd.events import DeletedSpace
from kvtide.store.ssd.tier import SsdTier, TierCommands
from kvtide.store.tally import Tally


@dataclass(frozen=True, slots=True)
class CurationRules:
    """``page_limit`` blocks in an answer, for which ``scan_limit`` are looked at."""

    page_limit: int = 1000
    scan_limit: int = 10_000
    soft_pin_limit_s: float = 86_400.0


@dataclass(frozen=True, slots=True)
class _Page:
    """Keys of blocks that fit, and where the next page starts."""

    keys: list[BlockKey]
    next_key: BlockKey | None


class Curation:
    """Part of the store's machine."""

    def __init__(
        self, inventory: Inventory, ssd: SsdTier, tally: Tally, rules: CurationRules
    ) -> None:
        """Looks after what the store has in both tiers."""
        self._inventory = inventory
        self._ssd = ssd
        self._tally = tally
        self._rules = rules

    def handle(
        self, message: CurationRequest, now_s: float, wall_ms: int
    ) -> tuple[CurationAnswer, TierCommands]:
        """Do what is asked for one page of blocks."""
        failure = self._refuse(message)
        if failure is not None:
            return failure, []
        limit = max(1, min(message.limit, self._rules.page_limit))
        page = self._page(message.select, message.after, limit)
        match message:
            case ListBlocks():
                listings = (self._listings(key, now_s) for key in page.keys)
                blocks = tuple(chain.from_iterable(listings))
                return BlockPage(blocks=blocks, next_key=page.next_key), []
            case PinBlocks() if message.hard:
                return self._hard_pins(page), []
            case PinBlocks():
                until_s = now_s + min(message.seconds, self._rules.soft_pin_limit_s)
                return self._each(page, lambda slot: self._pin_soft(slot, until_s)), []
            case UnpinBlocks():
                return self._each(page, self._inventory.table.unpin_all), []
            case RemoveBlocks():
                return self._removal(message, page, now_s, wall_ms)
            case _:
                assert_never(message)

    def _refuse(self, message: CurationRequest) -> Failure | None:
        select = message.select
        all_of_them = select == BlockSelector()
        if all_of_them and not isinstance(message, ListBlocks):
            reason = "say which blocks: by key, tenant or model"
            return Failure(code="too_wide", reason=reason)
        if select.keys is not None and len(select.keys) > self._rules.scan_limit:
            reason = f"name at most {self._rules.scan_limit} keys"
            return Failure(code="too_many_keys", reason=reason)
        if isinstance(message, PinBlocks) and not (message.hard or message.seconds > 0):
            reason = "say for how many seconds, or ask for a hard pin"
            return Failure(code="bad_time", reason=reason)
        return None

    # ---- which blocks

    def _page(self, select: BlockSelector, after: BlockKey | None, limit: int) -> _Page:
        if select.keys is None:
            keys, whole = self._next_keys(after)
        else:
            keys = sorted({key for key in select.keys if after is None or key > after})
            whole = True
        found: list[BlockKey] = []
        for key in keys:
            if len(found) == limit:
                return _Page(found, found[-1])
            if self._fits(select, key):
                found.append(key)
        return _Page(found, None if whole else keys[-1])

    def _next_keys(self, after: BlockKey | None) -> tuple[list[BlockKey], bool]:
        """The next keys of both tiers, and whether there are no more."""
        limit = self._rules.scan_limit
        dram = self._inventory.index.page(after, limit)
        ssd = self._ssd.books.entries.index.page(after, limit)
        keys = sorted({*dram, *ssd}) if ssd else dram
        return keys[:limit], len(dram) < limit and len(ssd) < limit and (
            len(keys) <= limit
        )

    def _fits(self, select: BlockSelector, key: BlockKey) -> bool:
        tags = self._tags(key)
        return (
            tags is not None
            and (select.tenant is None or select.tenant == tags.tenant)
            and (select.model is None or select.model == tags.model)
        )

    def _tags(self, key: BlockKey) -> SpaceTags | None:
        slot = self._inventory.index.get(key)
        if slot is not None:
            return self._inventory.space(slot).tags
        row = self._ssd.books.entries.find(key)
        return None if row is None else self._ssd.books.space(row).tags

    # ---- what is done with them

    def _each(self, page: _Page, change: Callable[[int], bool]) -> BlocksDone:
        """Change the slots of those that are in DRAM; the others are refused."""
        slots = [self._inventory.index.get(key) for key in page.keys]
        changed = sum(change(slot) for slot in slots if slot is not None)
        return BlocksDone(
            matched=len(slots),
            changed=changed,
            refused=slots.count(None),
            next_key=page.next_key,
        )

    def _hard_pins(self, page: _Page) -> BlocksDone:
        table = self._inventory.table
        before = table.keeps.hard_pinned
        slots = [self._inventory.index.get(key) for key in page.keys]
        pinned = sum(slot is not None and table.pin_hard(slot) for slot in slots)
        return BlocksDone(
            matched=len(slots),
            changed=table.keeps.hard_pinned - before,
            refused=len(slots) - pinned,
            next_key=page.next_key,
        )

    def _pin_soft(self, slot: int, until_s: float) -> bool:
        table = self._inventory.table
        longer = until_s > table.keeps.soft_until_s[slot]
        table.pin_soft(slot, until_s)
        return longer

    def _removal(
        self, message: RemoveBlocks, page: _Page, now_s: float, wall_ms: int
    ) -> tuple[BlocksDone, TierCommands]:
        copies = sum(self._remove(key, now_s) for key in page.keys)
        count = len(page.keys)
        done = BlocksDone(
            matched=count, changed=count, copies=copies, next_key=page.next_key
        )
        select = message.select
        if select.keys is not None:
            keys = page.keys
            if select.tenant is None and select.model is None and message.after is None:
                # a restart might find what was evicted, too
                keys = list(dict.fromkeys(select.keys))
            return done, self._ssd.remove(keys, wall_ms, now_s)
        if message.after is not None:
            return done, []
        # a tenant's or model's blocks on the SSD stay away in later lives too
        deleted = DeletedSpace(select.tenant, select.model, wall_ms)
        return done, self._ssd.delete(deleted, now_s)

    def _remove(self, key: BlockKey, now_s: float) -> int:
        """How many copies of it there were."""
        inventory, books = self._inventory, self._ssd.books
        slot, row = inventory.index.get(key), books.entries.find(key)
        if slot is not None:
            inventory.table.unpin_all(slot)
            inventory.drop(slot, "removed", now_s)
            # whoever pins it frees it in the end
            if not inventory.table.pins[slot]:
                inventory.free(slot)
        if row is not None:
            books.drop(row, "removed", now_s)
        self._tally.removed += 1
        return (slot is not None) + (row is not None)

    def _listings(self, key: BlockKey, now_s: float) -> Iterator[BlockListing]:
        slot = self._inventory.index.get(key)
        if slot is not None:
            yield self._listing(slot, now_s)
        row = self._ssd.books.entries.find(key)
        if row is not None:
            found = self._ssd.books.row(row)
            yield BlockListing(
                located=found.located,
                tokens=found.tokens,
                tenant=found.tags.tenant,
                model=found.tags.model,
            )

    def _listing(self, slot: int, now_s: float) -> BlockListing:
        table, tags = self._inventory.table, self._inventory.space(slot).tags
        soft_s = table.keeps.soft_until_s[slot]
        used_s = table.used_s[slot]
        return BlockListing(
            located=self._inventory.located(slot),
            tokens=table.tokens[slot],
            tenant=tags.tenant,
            model=tags.model,
            leases=table.pins[slot],
            hard=table.keeps.is_hard(slot),
            soft_ms=max(0.0, soft_s - now_s) * 1e3 if soft_s else 0.0,
            extra=table.keeps.is_extra(slot),
            uses=table.uses[slot],
            idle_ms=(now_s - used_s) * 1e3 if table.uses[slot] else None,
        )
