"""The blocks that a store has: slots, keys, and the changes that others must hear.

Whatever enters or leaves the index goes through here, so that gossip, catalog rows
and slots never disagree.
"""

from collections.abc import Iterator, Sequence

from kvtide.bus.messages import SnapshotPage
from kvtide.kv import PRIVATE_KEY, BlockKey, Located, NodeRef, SlotRef, Tier
from kvtide.store.changes import ChangeLog
from kvtide.store.events import BlockRow, GoneRow, Gossip, Verify, WriteRows
from kvtide.store.index import KeyIndex
from kvtide.store.slots import SlotState, SlotTable
from kvtide.store.spaces import Space, Spaces
from kvtide.store.tally import Tally
from kvtide.store.unsaved import Unsaved

GOSSIP_LIMIT = 1000
ROWS_PAGE = 1000
ARENA = 0


class Inventory:
    """See the module."""

    def __init__(self, store: NodeRef, table: SlotTable, tally: Tally) -> None:
        """An empty store."""
        self.store = store
        self.table = table
        self.index = KeyIndex()
        self.log = ChangeLog(store)
        self.spaces = Spaces()
        # what has no other tier to go to needs no record
        self.unsaved: Unsaved | None = None
        self._tally = tally
        self._came: dict[int, BlockRow] = {}
        self._gone: list[GoneRow] = []

    # ---- taking and giving slots

    def reserve(
        self, space: Space, key: BlockKey | None, tokens: int, now_s: float
    ) -> int | None:
        """A slot to write; evicts if it must. None: nothing may be evicted."""
        table, size, tenant = self.table, space.slot_bytes, space.tags.tenant
        number = self.spaces.join(space)
        while (victims := table.over_limit(size, tenant)) is not None:
            if not self._evicted(victims, now_s):
                self.spaces.leave(number)
                return None
        slot = self._take(number, space, tokens, now_s)
        while slot is None:
            if not self._evicted(table.victims(size, tenant), now_s):
                self.spaces.leave(number)
                return None
            slot = self._take(number, space, tokens, now_s)
        table.key[slot] = key
        return slot

    def reserve_idle(
        self, space: Space, key: BlockKey | None, tokens: int, now_s: float
    ) -> int | None:
        """As ``reserve``, but only extra copies are evicted for it."""
        number = self.spaces.join(space)
        slot = self._take(number, space, tokens, now_s)
        while slot is None:
            victim = self.table.next_extra(space.slot_bytes)
            if victim is None:
                self.spaces.leave(number)
                return None
            self.drop_extra(victim, now_s)
            slot = self._take(number, space, tokens, now_s)
        self.table.key[slot] = key
        return slot

    def _take(self, number: int, space: Space, tokens: int, now_s: float) -> int | None:
        return self.table.take(
            space.slot_bytes,
            space=number,
            tokens=tokens,
            tenant=space.tags.tenant,
            now_s=now_s,
        )

    def _evicted(self, victims: list[int], now_s: float) -> bool:
        """Evict them all; false: there are none."""
        for victim in victims:
            self.evict(victim, "evicted", now_s)
            self._tally.evicted += 1
        return bool(victims)

    def evict(self, slot: int, reason: str, now_s: float) -> None:
        """A block goes to make room: its policy remembers that, its slot is free."""
        self.table.evicting(slot)
        self.drop(slot, reason, now_s)
        self.free(slot)

    def limit_memory(self, limit_bytes: int, now_s: float) -> None:
        """Have memory behind that much of the arena; the coldest slabs go for it."""
        while victims := self.table.limit_memory(limit_bytes):
            self._evicted(victims, now_s)

    def mark_extra(self, slot: int, *, extra: bool) -> None:
        """Whether the block is elsewhere too, so that it is the first to go."""
        self.table.mark_extra(slot, extra=extra)

    def is_extra(self, slot: int) -> bool:
        """Whether the slot holds an extra copy."""
        return self.table.keeps.is_extra(slot)

    def drop_extra(self, slot: int, now_s: float) -> bool:
        """Drop an extra copy and free its slot; false: it is none, or it is kept."""
        if not self.is_extra(slot) or not self.table.evictable(slot):
            return False
        self.evict(slot, "extra", now_s)
        return True

    def free(self, slot: int) -> None:
        """A slot that is in use goes back, and its space with the last one of it."""
        self.table.free(slot)
        self.spaces.leave(self.table.space[slot])

    def admit(self, slot: int, header_xxh3: int, now_s: float) -> bool:
        """A verified slot is committed; false: its key was here, it stays private."""
        table = self.table
        table.commit(slot, header_xxh3)
        key = table.key[slot]
        return key is None or self.publish(slot, key, now_s)

    def publish(self, slot: int, key: BlockKey, now_s: float) -> bool:
        """A committed slot's block is for all; false: its key was here, it is private."""
        if self.index.get(key) is not None:
            self.table.key[slot] = None
            return False
        self.table.key[slot] = key
        self.index.add(key, slot)
        if self.unsaved is not None:
            self.unsaved.add(slot, now_s)
        self.came(self._row(slot), now_s)
        return True

    def drop(self, slot: int, reason: str, now_s: float) -> None:
        """Take a slot's block out of the index, if it is there; the slot stays."""
        key = self.table.key[slot]
        if key is None or self.index.get(key) != slot:
            return
        self.index.remove(key)
        if self.unsaved is not None:
            self.unsaved.discard(slot)
        self.table.key[slot] = None
        self.gone(GoneRow(key, self.table.generation[slot], reason), now_s)

    def came(self, row: BlockRow, now_s: float) -> None:
        """A copy, in whichever tier, can be had from now on: all must hear of it."""
        self.log.add(row.located, now_s)
        self._came[row.located.slot.generation] = row

    def gone(self, row: GoneRow, now_s: float) -> None:
        """A copy that came can't be had any more: all must hear of it."""
        self.log.drop(row.key, row.generation, now_s)
        if self._came.pop(row.generation, None) is None:
            self._gone.append(row)

    # ---- looking

    def space(self, slot: int) -> Space:
        """What the slot's block belongs to."""
        return self.spaces[self.table.space[slot]]

    def slot_ref(self, slot: int) -> SlotRef:
        """The present use of a slot, for others."""
        return SlotRef(
            node=self.store.node,
            epoch=self.store.epoch,
            tier=Tier.DRAM,
            arena=ARENA,
            offset=self.table.offset(slot),
            length=self.table.slot_bytes(slot),
            generation=self.table.generation[slot],
        )

    def located(self, slot: int) -> Located:
        """The descriptor of a committed block."""
        key = self.table.key[slot]
        return Located(
            PRIVATE_KEY if key is None else key,
            self.slot_ref(slot),
            self.table.header_xxh3[slot],
        )

    def copy_of(self, key: BlockKey) -> Located | None:
        """The copy of that block that is here."""
        slot = self.index.get(key)
        return None if slot is None else self.located(slot)

    def find(self, ref: SlotRef) -> int | None:
        """The slot, if it is in the use that ``ref`` names."""
        if ref.owner != self.store or ref.arena != ARENA:
            return None
        return self.table.find(ref.offset, ref.generation)

    def present(self, keys: Sequence[BlockKey]) -> tuple[Located, ...]:
        """The copies of the first keys, up to the first that is not here."""
        found: list[Located] = []
        for key in keys:
            slot = self.index.get(key)
            if slot is None:
                break
            found.append(self.located(slot))
        return tuple(found)

    def check_of(self, slot: int, header_xxh3: int) -> Verify:
        """What the slot's bytes must be."""
        key, space = self.table.key[slot], self.space(slot)
        return Verify(
            slot=slot,
            generation=self.table.generation[slot],
            offset=self.table.offset(slot),
            slot_bytes=space.slot_bytes,
            header_bytes=space.header_bytes,
            key=PRIVATE_KEY if key is None else key,
            tags=space.tags,
            tokens=self.table.tokens[slot],
            header_xxh3=header_xxh3,
        )

    def warm(self, keys: Sequence[BlockKey], hold_until_s: float, now_s: float) -> None:
        """Blocks are about to be read: the chain's head ends as the most recent."""
        for key in reversed(keys):
            slot = self.index.get(key)
            if slot is None or self.table.state[slot] != SlotState.COMMITTED:
                continue
            self.table.touch(slot, now_s)
            if hold_until_s > now_s:
                self.table.hold(slot, hold_until_s)

    # ---- telling

    def rows(self) -> Iterator[BlockRow]:
        """The whole state by key, for a catalog that lost changes.

        Each row is true when it is taken; changes may happen between two.
        """
        after: BlockKey | None = None
        while keys := self.index.page(after, ROWS_PAGE):
            after = keys[-1]
            for key in keys:
                slot = self.index.get(key)
                if slot is not None:
                    yield self._row(slot)

    def tell(self) -> list[Gossip | WriteRows]:
        """All changes that nobody heard of yet."""
        told: list[Gossip | WriteRows] = [
            Gossip(message) for message in self.log.take(GOSSIP_LIMIT)
        ]
        if self._came or self._gone:
            told.append(WriteRows(tuple(self._came.values()), tuple(self._gone)))
            self._came, self._gone = {}, []
        return told

    def page(self, after: BlockKey | None, limit: int) -> SnapshotPage:
        """A page of the index as of change ``log.seq``; call after ``tell``."""
        keys = self.index.page(after, limit)
        slots = (self.index.get(key) for key in keys)
        return SnapshotPage(
            store=self.store,
            seq=self.log.seq,
            located=tuple(self.located(slot) for slot in slots if slot is not None),
            next_key=keys[-1] if len(keys) == limit else None,
        )

    def _row(self, slot: int) -> BlockRow:
        tokens, tags = self.table.tokens[slot], self.space(slot).tags
        return BlockRow(self.located(slot), Tier.DRAM, tokens, tags)
