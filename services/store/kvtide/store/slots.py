"""The slot table: what each slot of the arena is used for. Pure, columns by slot.

States and the ways between them::

    FREE ──take──▶ WRITING ──commit──▶ COMMITTED
      ▲              │  │                 │  │
      └────free──────┘  └──quarantine──┐  │  │
      ▲                                ▼  ▼  │
      ├────free──────────────── QUARANTINED  │
      └────free───────────────────────────────┘

Every ``take`` gets a generation that no slot ever had before. A free slot goes to the
end of its class's line, so the longest unused is given out first. Only a committed
slot that nothing keeps (``Keeps``) can be a victim of eviction (``Candidates``).
"""

from array import array

from kvtide.kv import BlockKey
from kvtide.store.accounts import Account, Accounts
from kvtide.store.candidates import Candidates, Rank
from kvtide.store.errors import SlotStateError
from kvtide.store.eviction import NONE
from kvtide.store.keeps import Keeps
from kvtide.store.room import Room
from kvtide.store.slabs import (
    SLOT_ALIGN_BYTES,
    Back,
    GiveBack,
    LookAway,
    SizeClass,
    Slab,
    Slabs,
    always_backed,
    nothing_given_back,
)
from kvtide.store.slot_states import SlotCounts, SlotState, TableRules

NO_TENANT = b""


class SlotTable:
    """See the module. Slots are numbers; their columns are arrays."""

    def __init__(
        self,
        arena_bytes: int,
        rules: TableRules | None = None,
        *,
        slab_bytes: int = 32 << 20,
        first_generation: int = 1,
        back: Back = always_backed,
        give_back: GiveBack = nothing_given_back,
    ) -> None:
        """An empty arena; ``first_generation`` goes on where an earlier table was."""
        self.rules = rules = rules or TableRules()
        self.next_generation = first_generation
        self._slabs = Slabs(arena_bytes, slab_bytes, back, give_back)
        self._classes: dict[int, SizeClass] = {}
        self._counts = [0] * len(SlotState)
        self._used_bytes = 0
        self._tick = 0
        self._slab: list[Slab | None] = []
        self.state = array("B")
        self.generation = array("Q")
        self.touched = array("Q")
        self.used_s = array("d")
        self.uses = array("I")
        self.header_xxh3 = array("Q")
        self.space = array("I")
        self.tokens = array("I")
        self.account = array("I")
        self.key: list[BlockKey | None] = []
        self.keeps = Keeps(self.generation, self.touched)
        self.pins = self.keeps.pins
        self.held_until_s = self.keeps.held_until_s
        self.accounts = Accounts(rules.shares)
        self._candidates = Candidates(rules.policy.make(), self.accounts)
        self._room = Room(
            self._slabs, self._classes, self._candidates, self.account, self.touched
        )

    # ---- what there is

    def __len__(self) -> int:
        """Slot numbers in use or vacant: the length of each column."""
        return len(self.state)

    @property
    def arena_bytes(self) -> int:
        """The whole arena."""
        return self._slabs.arena_bytes

    @property
    def busy_bytes(self) -> int:
        """Bytes of the slots that are not free."""
        return self._slabs.busy_bytes

    @property
    def backed_bytes(self) -> int:
        """How much of the arena has memory behind it."""
        return self._slabs.backed_bytes

    @property
    def pinned(self) -> int:
        """Slots that a lease pins."""
        return self.keeps.pinned

    def back_again(self) -> None:
        """Memory that was refused may be asked for again."""
        self._slabs.back_again()

    def counts(self) -> SlotCounts:
        """The exact account."""
        return SlotCounts.of(self._counts, self._used_bytes)

    def offset(self, slot: int) -> int:
        """Where the slot starts in the arena."""
        return self._slab_of(slot).slot_offset(slot)

    def slot_bytes(self, slot: int) -> int:
        """How long a block of the slot's class is."""
        return self._slab_of(slot).size_class.slot_bytes

    def find(self, offset: int, generation: int) -> int | None:
        """The slot that starts at ``offset``, if it still is in that use."""
        slab = self._slabs.at(offset)
        if slab is None:
            return None
        index, rest = divmod(offset - slab.offset, slab.size_class.stride)
        slot = slab.first + index
        if rest or not self.is_use(slot, generation):
            return None
        return slot

    def is_use(self, slot: int, generation: int) -> bool:
        """Whether the slot is in use, and in the use that ``generation`` names."""
        return self.state[slot] > SlotState.FREE and self.generation[slot] == generation

    # ---- the life of a slot

    def take(
        self,
        slot_bytes: int,
        *,
        space: int,
        tokens: int,
        tenant: bytes = NO_TENANT,
        now_s: float = 0.0,
    ) -> int | None:
        """A slot to write, with a new generation. None: no room without eviction."""
        size_class = self._class(slot_bytes)
        if not size_class.free and not self._grow(size_class):
            return None
        slot = size_class.free.popleft()
        self._move(slot, SlotState.FREE, SlotState.WRITING)
        self.generation[slot] = self.next_generation
        self.next_generation += 1
        self.space[slot], self.tokens[slot] = space, tokens
        self.key[slot], self.header_xxh3[slot] = None, 0
        self.uses[slot], self.used_s[slot] = 0, 0.0
        account = self.accounts.join(tenant)
        self.account[slot] = account.number
        self.accounts.active(account, now_s)
        self._charge(account, slot_bytes)
        return slot

    def commit(self, slot: int, header_xxh3: int) -> None:
        """The writer is done and its bytes are verified; the slot starts unpinned."""
        self._move(slot, SlotState.WRITING, SlotState.COMMITTED)
        self.header_xxh3[slot] = header_xxh3
        self._candidates.policy.begin(slot, self._identity(slot), 0)
        self._line_up(slot)

    def quarantine(self, slot: int) -> None:
        """Nobody may use the slot until it is freed; pins and holds end."""
        self._leave_line(slot)
        self._move(slot, SlotState(self.state[slot]), SlotState.QUARANTINED)

    def free(self, slot: int) -> None:
        """The slot goes to the end of the line of free ones; pins and holds end."""
        self._leave_line(slot)
        self._move(slot, SlotState(self.state[slot]), SlotState.FREE)
        self.key[slot] = None
        size_class = self._slab_of(slot).size_class
        account = self._account_of(slot)
        self._charge(account, -size_class.slot_bytes)
        self.accounts.leave(account)
        size_class.free.append(slot)

    def evicting(self, slot: int) -> None:
        """The slot's block is about to go to make room; its policy remembers it."""
        if slot in self._candidates:
            self._candidates.evict(slot, self._identity(slot))

    # ---- what keeps a committed slot

    def pin(self, slot: int) -> None:
        """One more reason not to evict the slot."""
        self._expect(slot, SlotState.COMMITTED)
        self.keeps.pin(slot)
        self._unlink(slot)

    def unpin(self, slot: int) -> None:
        """One reason less; without any, the slot is the most recently used."""
        if self.pins[slot] == 0:
            raise SlotStateError("has no pin to take away", slot=slot)
        self.keeps.unpin(slot)
        self._line_up(slot)

    def touch(self, slot: int, now_s: float = 0.0) -> None:
        """The slot is used, and the most recently used now."""
        self._expect(slot, SlotState.COMMITTED)
        self._tick += 1
        self.touched[slot] = self._tick
        self.uses[slot] += 1
        self.used_s[slot] = now_s
        account = self._account_of(slot)
        self.accounts.active(account, now_s)
        self._candidates.use(slot, account)

    def look(self, slot: int) -> LookAway:
        """Keep the memory behind the slot, but not its block, until that is called."""
        return self._slabs.look(self._slab_of(slot))

    def hold(self, slot: int, until_s: float) -> None:
        """Do not evict the slot before ``until_s``, rounded up to half a second."""
        self._expect(slot, SlotState.COMMITTED)
        if self.keeps.hold(slot, until_s):
            self._unlink(slot)

    def pin_soft(self, slot: int, until_s: float) -> None:
        """Evict the slot before ``until_s`` only if nothing else may go."""
        self._expect(slot, SlotState.COMMITTED)
        self.keeps.pin_soft(slot, until_s)
        self._stand_anew(slot)

    def pin_hard(self, slot: int) -> bool:
        """Keep the slot until ``unpin_hard``; false: too much is pinned like that."""
        self._expect(slot, SlotState.COMMITTED)
        if self.keeps.is_hard(slot):
            return True
        slot_bytes = self.slot_bytes(slot)
        limit = self.rules.hard_pin_share * self.arena_bytes
        if self.keeps.hard_bytes + slot_bytes > limit:
            return False
        self.keeps.pin_hard(slot, slot_bytes)
        self._unlink(slot)
        return True

    def unpin_all(self, slot: int) -> bool:
        """End what people pinned; false: nobody did."""
        self._expect(slot, SlotState.COMMITTED)
        keeps = self.keeps
        if not keeps.is_hard(slot) and keeps.soft_until_s[slot] == 0.0:
            return False
        keeps.unpin_soft(slot)
        keeps.unpin_hard(slot, self.slot_bytes(slot))
        self._stand_anew(slot)
        return True

    def mark_extra(self, slot: int, *, extra: bool = True) -> None:
        """Whether the block is elsewhere too: such copies go first, on nobody's account."""
        self._expect(slot, SlotState.COMMITTED)
        if self.keeps.is_extra(slot) != extra:
            change = -self.slot_bytes(slot) if extra else self.slot_bytes(slot)
            self.keeps.mark_extra(slot, extra=extra)
            self._charge(self._account_of(slot), change)
            self._stand_anew(slot)

    @property
    def first_hold_ends_s(self) -> float | None:
        """When ``end_holds`` next has something to do."""
        return self.keeps.first_ends_s

    def end_holds(self, now_s: float) -> None:
        """Let holds and soft pins go whose time has come."""
        self.keeps.end(now_s, self._line_up)
        while (account := self.accounts.next_idle(now_s)) is not None:
            self._candidates.moved(account)

    # ---- who goes

    def evictable(self, slot: int) -> bool:
        """Whether nothing keeps the slot: it is committed, without pin or hold."""
        return slot in self._candidates

    def next_extra(self, slot_bytes: int) -> int | None:
        """The extra copy of that size that goes first."""
        slot = self._candidates.next(self._class(slot_bytes).number, Rank.EXTRA)
        return None if slot == NONE else slot

    def victims(self, slot_bytes: int, tenant: bytes | None = None) -> list[int]:
        """Slots whose going makes room for ``slot_bytes``; empty: nothing may go.

        Usually one slot of the same size; else those of a slab of another size, when
        that one's blocks are older or this size has none. ``tenant`` wants the room:
        of a tenant that has less than it nothing goes.
        """
        account = None if tenant is None else self.accounts.find(tenant)
        return self._room.victims(self._class(slot_bytes), account, self._slab)

    def over_limit(self, slot_bytes: int, tenant: bytes) -> list[int] | None:
        """What of its own a tenant must give for a block more; None: it need not.

        Empty: it must, and nothing of its own may go.
        """
        account = self.accounts.find(tenant)
        if account is None or not self.accounts.over_limit(account, slot_bytes):
            limit = self.accounts.rules.limits_bytes.get(tenant)
            return [] if limit is not None and slot_bytes > limit else None
        slot = self._candidates.next_of(account, self._class(slot_bytes).number)
        return [] if slot == NONE else [slot]

    # ---- memory for the host

    def limit_memory(self, limit_bytes: int) -> list[int]:
        """Have memory behind at most ``limit_bytes``; what must go first for it.

        Those in use that go are whole slabs, the coldest. Empty: it is done, or no
        slab can be emptied. Call it again when they are freed.
        """
        slabs = self._slabs
        slabs.limit_bytes = limit_bytes
        while (over := slabs.backed_bytes - limit_bytes) > 0:
            slabs.return_memory(over)
            if slabs.backed_bytes <= limit_bytes:
                return []
            idle = slabs.idle()
            if idle is None:
                return self._room.coldest_slab(self._slab)
            self._unmake(idle)
        return []

    # ---- inside

    def _class(self, slot_bytes: int) -> SizeClass:
        size_class = self._classes.get(slot_bytes)
        if size_class is None:
            stride = -(-slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
            size_class = SizeClass(len(self._classes), slot_bytes, stride)
            self._candidates.add_class()
            self._classes[slot_bytes] = size_class
        return size_class

    def _grow(self, size_class: SizeClass) -> bool:
        slab = self._slabs.make(size_class)
        while slab is None:
            idle = self._slabs.idle_of_others(size_class)
            if idle is None:
                return False
            self._unmake(idle)
            slab = self._slabs.make(size_class)
        self._lengthen(self._slabs.slot_numbers - len(self.state))
        for slot in slab.slots():
            self._count(slot, SlotState.VACANT, SlotState.FREE)
            self._slab[slot] = slab
        return True

    def _unmake(self, idle: Slab) -> None:
        self._slabs.unmake(idle)
        for slot in idle.slots():
            self._count(slot, SlotState.FREE, SlotState.VACANT)
            self._slab[slot] = None

    def _lengthen(self, count: int) -> None:
        if count <= 0:
            return
        zeros = [0] * count
        for column in (self.state, self.generation, self.touched, self.uses):
            column.extend(zeros)
        for column in (self.header_xxh3, self.space, self.tokens, self.account):
            column.extend(zeros)
        self.used_s.extend([0.0] * count)
        self.key.extend([None] * count)
        self._slab.extend([None] * count)
        self.keeps.add_slots(count)
        self._candidates.add_slots(count)
        self._counts[SlotState.VACANT] += count

    def _slab_of(self, slot: int) -> Slab:
        slab = self._slab[slot]
        if slab is None:
            raise SlotStateError("belongs to no slab", slot=slot)
        return slab

    def _account_of(self, slot: int) -> Account:
        return self.accounts[self.account[slot]]

    def _charge(self, account: Account, change_bytes: int) -> None:
        if self.accounts.charge(account, change_bytes):
            self._candidates.moved(account)

    def _identity(self, slot: int) -> int:
        """What a policy knows the block by: its key, or that it is this use's own."""
        key = self.key[slot]
        return self.generation[slot] if key is None else int.from_bytes(key[:8])

    def _expect(self, slot: int, state: SlotState) -> None:
        if self.state[slot] != state:
            found = SlotState(self.state[slot]).name
            raise SlotStateError(f"is {found}, not {state.name}", slot=slot)

    def _count(self, slot: int, before: SlotState, after: SlotState) -> None:
        self.state[slot] = after
        self._counts[before] -= 1
        self._counts[after] += 1

    def _move(self, slot: int, before: SlotState, after: SlotState) -> None:
        self._expect(slot, before)
        if before in (after, SlotState.VACANT):
            raise SlotStateError(f"is {before.name} already", slot=slot)
        self._count(slot, before, after)
        slab = self._slab_of(slot)
        if SlotState.FREE in (before, after):
            self._slabs.count_busy(slab, 1 if before == SlotState.FREE else -1)
        if SlotState.COMMITTED in (before, after):
            sign = 1 if after == SlotState.COMMITTED else -1
            self._used_bytes += sign * slab.size_class.slot_bytes

    def _leave_line(self, slot: int) -> None:
        self._unlink(slot)
        if self.state[slot] == SlotState.COMMITTED:
            # its account is charged for it again until the slot is free
            self.mark_extra(slot, extra=False)
            self._unlink(slot)
        self.keeps.forget(slot, self.slot_bytes(slot))

    def _unlink(self, slot: int) -> None:
        if slot in self._candidates:
            self._candidates.leave(slot)

    def _stand_anew(self, slot: int) -> None:
        """What keeps the slot is another thing now."""
        self._unlink(slot)
        if self.keeps.free(slot):
            self._candidates.enter(
                slot,
                self._slab_of(slot).size_class.number,
                self._account_of(slot),
                self.keeps.rank(slot),
            )

    def _line_up(self, slot: int) -> None:
        """Stand at the end of the line, unless something keeps the slot out of it."""
        self._tick += 1
        self.touched[slot] = self._tick
        self._stand_anew(slot)
