"""What keeps a committed slot from being evicted, by column. Pure.

A *pin* is a lease's and counted: the slot stays. A *hold* is a placement's: the slot
stays until a time. A *hard pin* is a person's: the slot stays until it is unpinned; all
of them together have a bounded part of the arena, so that serving goes on. A *soft pin*
is a person's too and ends by itself: until then the slot goes only if nothing else can.
"""

import heapq
import math
from array import array
from collections.abc import Callable

from kvtide.store.candidates import Rank

HOLD_GRAIN_S = 0.5
SPARE_ENTRIES = 1024

_Entry = tuple[float, int, int, int]
"""When it ends, in which order those of one moment end, slot, generation."""

_HARD = 1
_EXTRA = 2


class Keeps:
    """See the module. Slots are numbers; their columns are arrays."""

    def __init__(self, generation: "array[int]", touched: "array[int]") -> None:
        """No slots yet; the columns of the table's that it looks at."""
        self._generation = generation
        self._touched = touched
        self.pins = array("I")
        self.held_until_s = array("d")
        self.soft_until_s = array("d")
        self._flags = array("B")
        self._holds: list[_Entry] = []
        self._softs: list[_Entry] = []
        self.pinned = 0
        self.soft_pinned = 0
        self.hard_pinned = 0
        self.hard_bytes = 0

    def add_slots(self, count: int) -> None:
        """Make room for ``count`` more slots, which nothing keeps."""
        zeros = [0] * count
        self.pins.extend(zeros)
        self._flags.extend(zeros)
        self.held_until_s.extend([0.0] * count)
        self.soft_until_s.extend([0.0] * count)

    def free(self, slot: int) -> bool:
        """Whether nothing keeps the slot, but perhaps a soft pin."""
        return (
            self.pins[slot] == 0
            and self.held_until_s[slot] == 0.0
            and not self._flags[slot] & _HARD
        )

    def rank(self, slot: int) -> Rank:
        """Among the slots that may go."""
        if self.soft_until_s[slot] > 0.0:
            return Rank.SOFT_PINNED
        return Rank.EXTRA if self._flags[slot] & _EXTRA else Rank.ORDINARY

    # ---- pins of leases

    def pin(self, slot: int) -> None:
        """One more reason."""
        self.pinned += self.pins[slot] == 0
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """One reason less."""
        self.pins[slot] -= 1
        self.pinned -= self.pins[slot] == 0

    # ---- holds of placements

    def hold(self, slot: int, until_s: float) -> bool:
        """Keep it until then, rounded up to half a second; false: it is already."""
        until_s = math.ceil(until_s / HOLD_GRAIN_S) * HOLD_GRAIN_S
        if until_s <= self.held_until_s[slot]:
            return False
        self.held_until_s[slot] = until_s
        # holds that end together end in the order of their last touch
        heapq.heappush(self._holds, self._entry(until_s, slot))
        return True

    @property
    def first_ends_s(self) -> float | None:
        """When ``end`` next has something to do."""
        ends = [heap[0][0] for heap in (self._holds, self._softs) if heap]
        return min(ends, default=None)

    def end(self, now_s: float, ended: Callable[[int], None]) -> None:
        """Let holds and soft pins go whose time has come; tell of each slot."""
        while self._holds and self._holds[0][0] <= now_s:
            until_s, _, slot, generation = heapq.heappop(self._holds)
            same = self._generation[slot] == generation
            if same and self.held_until_s[slot] == until_s:
                self.held_until_s[slot] = 0.0
                ended(slot)
        while self._softs and self._softs[0][0] <= now_s:
            _, _, slot, generation = heapq.heappop(self._softs)
            until_s = self.soft_until_s[slot]
            if until_s == 0.0 or self._generation[slot] != generation:
                continue
            if until_s > now_s:
                # it was made longer
                heapq.heappush(self._softs, self._entry(until_s, slot))
                continue
            self.unpin_soft(slot)
            ended(slot)

    # ---- pins of people

    def pin_soft(self, slot: int, until_s: float) -> None:
        """Let it go last until then, or until later if that was said before."""
        before_s = self.soft_until_s[slot]
        self.soft_until_s[slot] = max(before_s, until_s)
        if before_s > 0.0:
            return
        self.soft_pinned += 1
        heapq.heappush(self._softs, self._entry(until_s, slot))
        if len(self._softs) > 2 * self.soft_pinned + SPARE_ENTRIES:
            self._softs = [
                self._entry(end_s, pinned)
                for pinned, end_s in enumerate(self.soft_until_s)
                if end_s > 0.0
            ]
            heapq.heapify(self._softs)

    def unpin_soft(self, slot: int) -> None:
        """End its soft pin, if it has one."""
        self.soft_pinned -= self.soft_until_s[slot] > 0.0
        self.soft_until_s[slot] = 0.0

    def is_hard(self, slot: int) -> bool:
        """Whether it has a hard pin."""
        return bool(self._flags[slot] & _HARD)

    def pin_hard(self, slot: int, slot_bytes: int) -> None:
        """Keep it until ``unpin_hard``."""
        self._flags[slot] |= _HARD
        self.hard_pinned += 1
        self.hard_bytes += slot_bytes

    def unpin_hard(self, slot: int, slot_bytes: int) -> None:
        """End its hard pin, if it has one."""
        if self._flags[slot] & _HARD:
            self._flags[slot] ^= _HARD
            self.hard_pinned -= 1
            self.hard_bytes -= slot_bytes

    # ---- extra copies

    def is_extra(self, slot: int) -> bool:
        """Whether the block is elsewhere too."""
        return bool(self._flags[slot] & _EXTRA)

    def mark_extra(self, slot: int, *, extra: bool) -> None:
        """Say whether it is."""
        self._flags[slot] = self._flags[slot] & _HARD | _EXTRA * extra

    def forget(self, slot: int, slot_bytes: int) -> None:
        """The use of the slot ends, and all that kept it."""
        self.pinned -= self.pins[slot] > 0
        self.pins[slot] = 0
        self.held_until_s[slot] = 0.0
        self.unpin_soft(slot)
        self.unpin_hard(slot, slot_bytes)
        self._flags[slot] = 0

    def _entry(self, until_s: float, slot: int) -> _Entry:
        return until_s, self._touched[slot], slot, self._generation[slot]
