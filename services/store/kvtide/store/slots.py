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
slot without pin or hold can be a victim of eviction.
"""

import heapq
import math
from array import array
from dataclasses import dataclass
from enum import IntEnum

from kvtide.kv import BlockKey
from kvtide.store.errors import SlotStateError
from kvtide.store.recency import NONE, Recency
from kvtide.store.slabs import (
    SLOT_ALIGN_BYTES,
    Back,
    SizeClass,
    Slab,
    Slabs,
    always_backed,
)

HOLD_GRAIN_S = 0.5


class SlotState(IntEnum):
    """What a slot is used for. ``VACANT`` numbers belong to no slab at present."""

    VACANT = 0
    FREE = 1
    WRITING = 2
    COMMITTED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """``free + used + reserved + quarantined == total``, always."""

    total: int
    free: int
    used: int
    reserved: int
    quarantined: int
    used_bytes: int


class SlotTable:
    """See the module. Slots are numbers; their columns are arrays."""

    def __init__(
        self,
        arena_bytes: int,
        *,
        slab_bytes: int = 32 << 20,
        first_generation: int = 1,
        back: Back = always_backed,
    ) -> None:
        """An empty arena; ``first_generation`` goes on where an earlier table was."""
        self.next_generation = first_generation
        self._slabs = Slabs(arena_bytes, slab_bytes, back)
        self._classes: dict[int, SizeClass] = {}
        self._recency = Recency()
        self._counts = [0] * len(SlotState)
        self.pinned = 0
        self._used_bytes = 0
        self._tick = 0
        self._holds: list[tuple[float, int, int, int]] = []
        self._slab: list[Slab | None] = []
        self.state = array("B")
        self.generation = array("Q")
        self.pins = array("I")
        self.held_until_s = array("d")
        self.touched = array("Q")
        self.header_xxh3 = array("Q")
        self.space = array("I")
        self.tokens = array("I")
        self.key: list[BlockKey | None] = []

    # ---- what there is

    def __len__(self) -> int:
        """Slot numbers in use or vacant: the length of each column."""
        return len(self.state)

    @property
    def arena_bytes(self) -> int:
        """The whole arena."""
        return self._slabs.arena_bytes

    def back_again(self) -> None:
        """Memory that was refused may be asked for again."""
        self._slabs.back_again()

    def counts(self) -> SlotCounts:
        """The exact account."""
        counts = self._counts
        return SlotCounts(
            total=sum(counts[SlotState.FREE :]),
            free=counts[SlotState.FREE],
            used=counts[SlotState.COMMITTED],
            reserved=counts[SlotState.WRITING],
            quarantined=counts[SlotState.QUARANTINED],
            used_bytes=self._used_bytes,
        )

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

    def take(self, slot_bytes: int, *, space: int, tokens: int) -> int | None:
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
        return slot

    def commit(self, slot: int, header_xxh3: int) -> None:
        """The writer is done and its bytes are verified; the slot starts unpinned."""
        self._move(slot, SlotState.WRITING, SlotState.COMMITTED)
        self.header_xxh3[slot] = header_xxh3
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
        self._slab_of(slot).size_class.free.append(slot)

    # ---- what keeps a committed slot, and in which order they go

    def pin(self, slot: int) -> None:
        """One more reason not to evict the slot."""
        self._expect(slot, SlotState.COMMITTED)
        self.pinned += self.pins[slot] == 0
        self.pins[slot] += 1
        self._unlink(slot)

    def unpin(self, slot: int) -> None:
        """One reason less; without any, the slot is the most recently used."""
        if self.pins[slot] == 0:
            raise SlotStateError("has no pin to take away", slot=slot)
        self.pins[slot] -= 1
        self.pinned -= self.pins[slot] == 0
        self._line_up(slot)

    def touch(self, slot: int) -> None:
        """The slot is the most recently used now."""
        self._expect(slot, SlotState.COMMITTED)
        self._unlink(slot)
        self._line_up(slot)

    def hold(self, slot: int, until_s: float) -> None:
        """Do not evict the slot before ``until_s``, rounded up to half a second."""
        self._expect(slot, SlotState.COMMITTED)
        until_s = math.ceil(until_s / HOLD_GRAIN_S) * HOLD_GRAIN_S
        if until_s <= self.held_until_s[slot]:
            return
        self.held_until_s[slot] = until_s
        # holds that end together line up in the order of their last touch
        entry = (until_s, self.touched[slot], slot, self.generation[slot])
        heapq.heappush(self._holds, entry)
        self._unlink(slot)

    @property
    def first_hold_ends_s(self) -> float | None:
        """When ``end_holds`` next has something to do."""
        return self._holds[0][0] if self._holds else None

    def end_holds(self, now_s: float) -> None:
        """Let holds go whose time has come."""
        while self._holds and self._holds[0][0] <= now_s:
            until_s, _, slot, generation = heapq.heappop(self._holds)
            if self.is_use(slot, generation) and self.held_until_s[slot] == until_s:
                self.held_until_s[slot] = 0.0
                self._line_up(slot)

    def evictable(self, slot: int) -> bool:
        """Whether nothing keeps the slot: it is committed, without pin or hold."""
        return slot in self._recency

    def victims(self, slot_bytes: int) -> list[int]:
        """Slots whose going makes room for ``slot_bytes``; empty: nothing may go.

        Usually the least recently used slot of the same size; else those of a slab
        of another size, when that one's blocks are older or this size has none.
        """
        own = self._class(slot_bytes)
        mine = self._recency.oldest(own.number)
        slab = self._older_slab(own, mine)
        if slab is not None:
            return self._linked(slab)
        return [mine] if mine != NONE else self._run_of_others(own)

    def _older_slab(self, own: SizeClass, mine: int) -> Slab | None:
        """A slab of another size that goes before slot ``mine`` does."""
        limit = self._tick + 1 if mine == NONE else self.touched[mine]
        oldest, slab = limit, None
        for other in self._classes.values():
            first = self._recency.oldest(other.number)
            if other is not own and first != NONE and self.touched[first] < oldest:
                oldest, slab = self.touched[first], self._slab_of(first)
        if slab is None or slab.length < own.stride:
            return None
        linked = self._linked(slab)
        younger = sum(1 for slot in linked if self.touched[slot] > limit)
        if len(linked) < slab.busy or 2 * younger > len(linked):
            return None
        return slab

    def _run_of_others(self, own: SizeClass) -> list[int]:
        """The slots of neighbouring slabs that together have room for one slot."""
        run: list[int] = []
        start = 0
        for slab in self._slabs:
            end = slab.offset + slab.length
            linked = self._linked(slab)
            if slab.size_class is own or len(linked) < slab.busy:
                run, start = [], end
                continue
            run.extend(linked)
            if end - start >= own.stride:
                return run
        return run if self._slabs.end - start >= own.stride else []

    def _linked(self, slab: Slab) -> list[int]:
        return [slot for slot in slab.slots() if slot in self._recency]

    # ---- inside

    def _class(self, slot_bytes: int) -> SizeClass:
        size_class = self._classes.get(slot_bytes)
        if size_class is None:
            stride = -(-slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
            size_class = SizeClass(self._recency.add_line(), slot_bytes, stride)
            self._classes[slot_bytes] = size_class
        return size_class

    def _grow(self, size_class: SizeClass) -> bool:
        slab = self._slabs.make(size_class)
        while slab is None:
            idle = self._slabs.idle_of_others(size_class)
            if idle is None:
                return False
            self._slabs.unmake(idle)
            for slot in idle.slots():
                self._count(slot, SlotState.FREE, SlotState.VACANT)
                self._slab[slot] = None
            slab = self._slabs.make(size_class)
        self._lengthen(self._slabs.slot_numbers - len(self.state))
        for slot in slab.slots():
            self._count(slot, SlotState.VACANT, SlotState.FREE)
            self._slab[slot] = slab
        return True

    def _lengthen(self, count: int) -> None:
        if count <= 0:
            return
        zeros = [0] * count
        for column in (self.state, self.generation, self.pins, self.touched):
            column.extend(zeros)
        for column in (self.header_xxh3, self.space, self.tokens):
            column.extend(zeros)
        self.held_until_s.extend([0.0] * count)
        self.key.extend([None] * count)
        self._slab.extend([None] * count)
        self._recency.add_slots(count)
        self._counts[SlotState.VACANT] += count

    def _slab_of(self, slot: int) -> Slab:
        slab = self._slab[slot]
        if slab is None:
            raise SlotStateError("belongs to no slab", slot=slot)
        return slab

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
        self.pinned -= self.pins[slot] > 0
        self.pins[slot] = 0
        self.held_until_s[slot] = 0.0

    def _unlink(self, slot: int) -> None:
        if slot in self._recency:
            self._recency.remove(self._slab_of(slot).size_class.number, slot)

    def _line_up(self, slot: int) -> None:
        """Stand at the end of the line, unless something keeps the slot out of it."""
        self._tick += 1
        self.touched[slot] = self._tick
        if self.pins[slot] == 0 and self.held_until_s[slot] == 0.0:
            self._recency.append(self._slab_of(slot).size_class.number, slot)
