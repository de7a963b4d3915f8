"""Which blocks were evicted a short while ago, in a fixed number of bytes a slot."""

from array import array

WAYS = 4
_MIX = 0x9E3779B97F4A7C15
_LOW_64 = (1 << 64) - 1
_LOW_32 = (1 << 32) - 1


class Ghost:
    """Fingerprints with the time they were added, counted in additions.

    A table of sets of ``WAYS`` entries: of a full set the oldest is forgotten early,
    and one in about 2^30 strangers is taken for a friend.
    """

    def __init__(self) -> None:
        """Nobody is remembered, and there is room for nobody yet."""
        self._entries = array("Q")
        self._now = 0

    def make_room(self, slots: int) -> None:
        """Twice as many entries as slots; growing forgets what was known."""
        size = WAYS
        while size < 2 * slots:
            size *= 2
        if size > len(self._entries):
            self._entries = array("Q", bytes(8 * size))

    def add(self, identity: int) -> None:
        """Remember a block."""
        self._now = (self._now + 1) & _LOW_32
        start, mark = self._place(identity)
        now, entries = self._now, self._entries
        oldest = max(
            range(start, start + WAYS),
            key=lambda at: (now - entries[at]) & _LOW_32 if entries[at] else _LOW_32,
        )
        entries[oldest] = mark | now

    def take(self, identity: int, span: int) -> bool:
        """Whether it is among the last ``span`` that were added; if so, forget it."""
        start, mark = self._place(identity)
        for at in range(start, start + WAYS):
            entry = self._entries[at]
            if entry and entry & ~_LOW_32 == mark:
                self._entries[at] = 0
                return (self._now - entry) & _LOW_32 < span
        return False

    def _place(self, identity: int) -> tuple[int, int]:
        """Where its set starts, and its fingerprint in the high half."""
        mixed = identity * _MIX & _LOW_64
        mixed = (mixed ^ mixed >> 29) * _MIX & _LOW_64
        start = mixed % (len(self._entries) // WAYS) * WAYS
        return start, (mixed & ~_LOW_32) | 1 << 63
