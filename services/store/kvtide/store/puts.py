"""Puts: which slots a writer gets, and what becomes of what it wrote."""

from dataclasses import dataclass

from kvtide.bus.messages import (
    BlockState,
    CommitBlock,
    Failure,
    PutBegin,
    PutBlock,
    PutCommit,
    PutCommitted,
    PutGranted,
    PutSlot,
)
from kvtide.store.events import Command, Reply, Verified
from kvtide.store.inventory import Inventory
from kvtide.store.leases import Held, Owner
from kvtide.store.slots import SlotState
from kvtide.store.spaces import Space
from kvtide.store.tally import Tally

MAX_PUT_BLOCKS = 8192
MAX_OWNER_LEASES = 4096


@dataclass(slots=True)
class _Waiting:
    """A commit that waits until ``left`` of its slots are verified."""

    token: int | None
    states: list[BlockState]
    left: int = 0


class Puts:
    """See the module; part of the store's machine."""

    def __init__(self, inventory: Inventory, tally: Tally) -> None:
        """Nothing is under way."""
        self._inventory = inventory
        self._tally = tally
        self._waiting: dict[tuple[int, int], list[tuple[_Waiting, int]]] = {}
        self._writers: dict[tuple[int, int], Held] = {}

    # ---- begin

    def begin(
        self, owner: Owner, message: PutBegin, now_s: float
    ) -> PutGranted | Failure:
        """Slots for a put; the same ones again for a repeat."""
        held = owner.leases.get(message.lease)
        refusal = self._refuse(owner, held, message)
        if refusal is not None:
            return refusal
        if held is None:
            held = owner.leases[message.lease] = Held(message.lease)
        granted = held.grants.get(message.put)
        if granted is None:
            self._tally.puts += 1
            space = Space(message.tags, message.slot_bytes, message.header_bytes)
            slots = tuple(
                self._grant(held, space, block, now_s) for block in message.blocks
            )
            granted = PutGranted(put=message.put, slots=slots)
            held.remember(granted)
        return granted

    def _refuse(
        self, owner: Owner, held: Held | None, message: PutBegin
    ) -> Failure | None:
        arena = self._inventory.table.arena_bytes
        if not 0 < message.header_bytes < message.slot_bytes <= arena:
            return Failure(
                code="bad_size",
                reason=f"no slot has {message.slot_bytes} bytes, of them "
                f"{message.header_bytes} for the header: the arena has {arena}",
            )
        if len(message.blocks) > MAX_PUT_BLOCKS:
            reason = f"ask for at most {MAX_PUT_BLOCKS} blocks in a put"
            return Failure(code="too_many_blocks", reason=reason)
        if held is None and len(owner.leases) >= MAX_OWNER_LEASES:
            reason = f"an owner holds at most {MAX_OWNER_LEASES} leases"
            return Failure(code="too_many_leases", reason=reason)
        if held is not None and held.expired:
            reason = "the lease expired while its owner was silent: release it"
            return Failure(code="expired", reason=reason)
        return None

    def _grant(
        self, held: Held, space: Space, block: PutBlock, now_s: float
    ) -> PutSlot:
        table, index = self._inventory.table, self._inventory.index
        existing = None if block.key is None else index.get(block.key)
        if existing is not None and self._inventory.space(existing) == space:
            self._tally.existing += 1
            generation = table.generation[existing]
            if not held.has(existing, generation):
                table.pin(existing)
                held.slots[existing] = generation
            return PutSlot(None, self._inventory.located(existing))
        slot = self._inventory.reserve(space, block.key, block.tokens, now_s)
        if slot is None:
            self._tally.no_room += 1
            return PutSlot(None)
        held.slots[slot] = table.generation[slot]
        return PutSlot(self._inventory.slot_ref(slot))

    # ---- commit

    def commit(
        self, held: Held | None, message: PutCommit, token: int | None
    ) -> list[Command]:
        """Have each written slot verified; answer when the last one is."""
        waiting = _Waiting(token, [BlockState.STALE] * len(message.blocks))
        commands: list[Command] = []
        for place, block in enumerate(message.blocks):
            slot = self._inventory.find(block.slot)
            generation = block.slot.generation
            if held is None or slot is None or not held.has(slot, generation):
                self._tally.stale_commits += 1
                continue
            commands += self._commit_block(held, slot, block, waiting, place)
        if waiting.left == 0:
            commands += _answer(waiting)
        return commands

    def _commit_block(
        self, held: Held, slot: int, block: CommitBlock, waiting: _Waiting, place: int
    ) -> list[Command]:
        table = self._inventory.table
        use = (slot, table.generation[slot])
        state = table.state[slot]
        if state == SlotState.COMMITTED:
            if table.header_xxh3[slot] == block.header_xxh3:
                duplicate = block.slot.generation in held.duplicates
                waiting.states[place] = (
                    BlockState.DUPLICATE if duplicate else BlockState.STORED
                )
            return []
        if state != SlotState.WRITING:
            return []
        waiting.left += 1
        asked = self._waiting.setdefault(use, [])
        asked.append((waiting, place))
        if len(asked) > 1:
            return []
        self._writers[use] = held
        table.header_xxh3[slot] = block.header_xxh3
        return [self._inventory.check_of(slot, block.header_xxh3)]

    def verified(self, event: Verified, now_s: float) -> list[Command]:
        """A slot's bytes were compared: it is committed, or it is not."""
        use = (event.slot, event.generation)
        asked = self._waiting.pop(use, [])
        held = self._writers.pop(use, None)
        state = BlockState.STALE
        if held is not None:
            state = self._settle(held, event, now_s)
        commands: list[Command] = []
        for waiting, place in asked:
            waiting.states[place] = state
            waiting.left -= 1
            if waiting.left == 0:
                commands += _answer(waiting)
        return commands

    def _settle(self, held: Held, event: Verified, now_s: float) -> BlockState:
        table = self._inventory.table
        slot = event.slot
        if (
            not table.is_use(slot, event.generation)
            or table.state[slot] != SlotState.WRITING
        ):
            self._tally.stale_commits += 1
            return BlockState.STALE
        if not event.ok:
            self._tally.corrupt_commits += 1
            return BlockState.CORRUPT
        first = self._inventory.admit(slot, table.header_xxh3[slot], now_s)
        table.pin(slot)
        if first:
            self._tally.stored += 1
            self._tally.stored_bytes += self._inventory.space(slot).slot_bytes
            return BlockState.STORED
        self._tally.duplicates += 1
        held.duplicates.add(event.generation)
        return BlockState.DUPLICATE


def _answer(waiting: _Waiting) -> list[Command]:
    if waiting.token is None:
        return []
    return [Reply(waiting.token, PutCommitted(states=tuple(waiting.states)))]
