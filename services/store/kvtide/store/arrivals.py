"""Copies that come from other stores: header first, then the bytes, then a slot. Pure.

The header says what the block is and so which slot it needs. Nothing is told to others
before every part was compared with a header that is the one its source announced.
"""

from collections.abc import Callable

from kvtide.bus.messages import ReplicaReason, ReplicaReply, Replicate
from kvtide.kv import BlockHeader, BlockKey
from kvtide.store.fetches import (
    ArrivalCommand,
    ArrivalEvent,
    BodyFetched,
    FetchBody,
    FetchHeader,
    HeaderFetched,
)
from kvtide.store.inventory import Inventory
from kvtide.store.replicas import ReplicaRules, Replicas
from kvtide.store.slots import SlotState
from kvtide.store.spaces import Space
from kvtide.store.tally import Tally


class Arrivals:
    """Part of the store's machine."""

    def __init__(
        self,
        inventory: Inventory,
        tally: Tally,
        rules: ReplicaRules,
        on_ssd: Callable[[BlockKey], bool] | None = None,
    ) -> None:
        """Nothing is wanted. ``on_ssd``: whether a block is here on the SSD."""
        self.replicas = Replicas(rules)
        self._inventory = inventory
        self._tally = tally
        self._on_ssd = on_ssd
        self._slots: dict[int, int] = {}

    def order(self, message: Replicate, now_s: float) -> ReplicaReply:
        """Take an order."""
        done = self.replicas.order(message.reason, message.located, self._has, now_s)
        self._tally.replicas_ordered += done.queued
        self._tally.replicas_refused += done.refused
        if message.reason is ReplicaReason.DRAIN:
            # what was an extra copy may be the only one soon
            for key in {each.key for each in message.located}:
                slot = self._inventory.index.get(key)
                if slot is not None:
                    self._inventory.mark_extra(slot, extra=False)
        return ReplicaReply(here=done.here, queued=done.queued, refused=done.refused)

    def drop_extras(self, keys: tuple[BlockKey, ...], now_s: float) -> None:
        """Drop those that are extra copies, unless something keeps them."""
        for key in keys:
            slot = self._inventory.index.get(key)
            if slot is not None and self._inventory.drop_extra(slot, now_s):
                self._tally.extras_dropped += 1

    def due(self, now_s: float) -> list[ArrivalCommand]:
        """What to begin now."""
        before = self.replicas.expired
        started = self.replicas.start(self._has, now_s)
        self._tally.replicas_expired += self.replicas.expired - before
        return [FetchHeader(each.number, each.source) for each in started]

    def handle(self, event: ArrivalEvent, now_s: float) -> list[ArrivalCommand]:
        """A fetch came forward; also what to begin because of it."""
        if isinstance(event, HeaderFetched):
            commands = self._header(event, now_s)
        else:
            self._body(event, now_s)
            commands = []
        return commands + self.due(now_s)

    def _has(self, key: BlockKey) -> bool:
        if self._inventory.index.get(key) is not None:
            return True
        return self._on_ssd is not None and self._on_ssd(key)

    def _header(self, event: HeaderFetched, now_s: float) -> list[ArrivalCommand]:
        fetch = self.replicas.fetch(event.number)
        if fetch is None:
            return []
        if event.raw is None:
            self._failed(event.number, event.corrupt, now_s)
            return []
        header = BlockHeader.decode(event.raw)
        space = Space(header.tags, header.slot_bytes, len(event.raw))
        slot = self._reserve(fetch.reason, space, fetch.source.key, header, now_s)
        if slot is None:
            self._tally.replicas_no_room += 1
            self.replicas.end(event.number)
            return []
        self._slots[event.number] = slot
        table = self._inventory.table
        body = FetchBody(
            number=event.number,
            source=fetch.source,
            raw=event.raw,
            slot=slot,
            offset=table.offset(slot),
            generation=table.generation[slot],
        )
        return [body]

    def _reserve(
        self,
        reason: ReplicaReason,
        space: Space,
        key: BlockKey,
        header: BlockHeader,
        now_s: float,
    ) -> int | None:
        """A slot; copies that are made to fill or to drain evict nothing but extras."""
        if reason in (ReplicaReason.FILL, ReplicaReason.DRAIN):
            return self._inventory.reserve_idle(space, key, header.tokens, now_s)
        return self._inventory.reserve(space, key, header.tokens, now_s)

    def _body(self, event: BodyFetched, now_s: float) -> None:
        fetch = self.replicas.fetch(event.number)
        slot = self._slots.pop(event.number, None)
        if fetch is None or slot is None:
            return
        table = self._inventory.table
        if table.state[slot] != SlotState.WRITING:
            self.replicas.end(event.number)
            return
        if event.header_xxh3 is None:
            self._inventory.free(slot)
            self._failed(event.number, event.corrupt, now_s)
            return
        self.replicas.end(event.number)
        if not self._inventory.admit(slot, event.header_xxh3, now_s):
            # it was put here meanwhile
            self._inventory.free(slot)
            return
        self._tally.replicas_stored += 1
        if fetch.reason is not ReplicaReason.DRAIN:
            self._inventory.mark_extra(slot, extra=True)

    def _failed(self, number: int, corrupt: bool, now_s: float) -> None:
        self._tally.replicas_corrupt += corrupt
        if not self.replicas.failed(number, now_s):
            self._tally.replicas_failed += 1
