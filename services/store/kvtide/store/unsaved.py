"""Which blocks only DRAM has: in the order in which they came. Pure, columns by slot.

The blocks of a put come front to back, so what is written in this order leaves no tail on
the SSD whose head is not there.
"""

from array import array

from kvtide.store.eviction import NONE, Lines


class Unsaved:
    """See the module. Everything takes constant time."""

    def __init__(self) -> None:
        """None."""
        self._lines = Lines()
        self._line = self._lines.add_line()
        self._since_s = array("d")

    def __len__(self) -> int:
        """How many there are."""
        return self._lines.length(self._line)

    def __contains__(self, slot: int) -> bool:
        """Whether the slot's block is one of them."""
        return slot < len(self._since_s) and slot in self._lines

    def add(self, slot: int, now_s: float) -> None:
        """The slot's block came, or could not be written: it is the last in line."""
        more = slot + 1 - len(self._since_s)
        if more > 0:
            more = max(more, len(self._since_s))
            self._lines.add_slots(more)
            self._since_s.extend([0.0] * more)
        self.discard(slot)
        self._lines.append(self._line, slot)
        self._since_s[slot] = now_s

    def discard(self, slot: int) -> None:
        """It is written, or gone."""
        if slot in self:
            self._lines.remove(slot)

    def first(self) -> tuple[int, float] | None:
        """The one that came first, and when."""
        slot = self._lines.oldest(self._line)
        return None if slot == NONE else (slot, self._since_s[slot])
