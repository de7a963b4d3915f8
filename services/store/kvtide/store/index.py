"""Which slot holds which key, in key order for snapshots."""

from bisect import bisect_right, insort

from kvtide.kv import BlockKey

_SHELVES = 1 << 12
_SHELF_SHIFT = 4


class KeyIndex:
    """Keys to slots. Keys are uniform, so they are kept sorted on shelves by prefix."""

    def __init__(self) -> None:
        """Empty."""
        self._slots: dict[BlockKey, int] = {}
        self._shelves: list[list[BlockKey]] = [[] for _ in range(_SHELVES)]

    def __len__(self) -> int:
        """Keys that have a slot."""
        return len(self._slots)

    def get(self, key: BlockKey) -> int | None:
        """The slot that holds the key."""
        return self._slots.get(key)

    def add(self, key: BlockKey, slot: int) -> None:
        """Remember where a key is that was nowhere."""
        self._slots[key] = slot
        insort(self._shelves[_shelf(key)], key)

    def remove(self, key: BlockKey) -> None:
        """Forget a key that is here."""
        del self._slots[key]
        shelf = self._shelves[_shelf(key)]
        del shelf[bisect_right(shelf, key) - 1]

    def page(self, after: BlockKey | None, limit: int) -> list[BlockKey]:
        """At most ``limit`` keys above ``after``, ascending."""
        found: list[BlockKey] = []
        number = 0 if after is None else _shelf(after)
        if after is not None:
            shelf = self._shelves[number]
            found.extend(shelf[bisect_right(shelf, after) :])
            number += 1
        while len(found) < limit and number < _SHELVES:
            found.extend(self._shelves[number])
            number += 1
        return found[:limit]


def _shelf(key: BlockKey) -> int:
    """The first twelve bits."""
    return int.from_bytes(key[:2].ljust(2, b"\0"), "big") >> _SHELF_SHIFT
