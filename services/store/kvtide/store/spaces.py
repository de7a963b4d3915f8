"""What many blocks have in common, kept once for as long as any slot is of it."""

from dataclasses import dataclass

from kvtide.kv import SpaceTags


@dataclass(frozen=True, slots=True)
class Space:
    """Tags and sizes: interned, so that a slot keeps a number."""

    tags: SpaceTags
    slot_bytes: int
    header_bytes: int


@dataclass(slots=True)
class _Kept:
    """A space and how many slots are of it."""

    space: Space
    slots: int = 0


class Spaces:
    """Spaces by number. A client may name a space of its own in every request.

    So a number lives as long as its slots, and is used again.
    """

    def __init__(self) -> None:
        """None."""
        self._kept: dict[int, _Kept] = {}
        self._numbers: dict[Space, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Spaces that have a slot."""
        return len(self._kept)

    def __getitem__(self, number: int) -> Space:
        """The space with that number, which has a slot."""
        return self._kept[number].space

    def join(self, space: Space) -> int:
        """One slot more is of this space; its number."""
        number = self._numbers.get(space)
        if number is None:
            number = self._free.pop() if self._free else len(self._kept)
            self._numbers[space] = number
            self._kept[number] = _Kept(space)
        self._kept[number].slots += 1
        return number

    def leave(self, number: int) -> None:
        """One slot less is of it; without any the number is free."""
        kept = self._kept[number]
        kept.slots -= 1
        if kept.slots == 0:
            del self._kept[number], self._numbers[kept.space]
            self._free.append(number)
