"""Whose going makes room for a block of some size: its own size first, or whole slabs.

Pure. Extra copies go first, softly pinned blocks last. Between them the fullest account
gives, and no account gives for one that is fuller than itself.
"""

from array import array
from collections.abc import Mapping
from itertools import islice

from kvtide.store.accounts import COMMON, Account, Accounts
from kvtide.store.candidates import Candidates, Rank
from kvtide.store.eviction import NONE
from kvtide.store.slabs import SizeClass, Slab, Slabs

_LAST = 1 << 63
_LOOKED_AT = 256
_NO_LEVEL = -1 << 20
_FULLER = 2
"""Steps between levels that make up for blocks of another size being younger."""


class Room:
    """Looks at the slot table's columns; changes nothing."""

    def __init__(
        self,
        slabs: Slabs,
        classes: Mapping[int, SizeClass],
        candidates: Candidates,
        account: "array[int]",
        touched: "array[int]",
    ) -> None:
        """``account`` and ``touched`` are columns by slot."""
        self._slabs = slabs
        self._classes = classes
        self._candidates = candidates
        self._account = account
        self._touched = touched

    @property
    def _accounts(self) -> Accounts:
        return self._candidates.accounts

    def victims(
        self, own: SizeClass, wanted_by: Account | None, slab_of: list[Slab | None]
    ) -> list[int]:
        """Slots whose going makes room for one of ``own``; empty: nothing may go."""
        extra = self._candidates.next(own.number, Rank.EXTRA)
        if extra != NONE:
            return [extra]
        number = COMMON if wanted_by is None else wanted_by.number
        mine = self._candidates.next(own.number, Rank.ORDINARY, number)
        if mine != NONE and not self._may_go(mine, wanted_by, Rank.ORDINARY):
            mine = NONE
        slab = self._better_slab(own, mine, wanted_by, slab_of)
        if slab is not None:
            return self._going(slab)
        if mine != NONE:
            return [mine]
        others = self._run_of_others(own, wanted_by, Rank.ORDINARY)
        if others:
            return others
        soft = self._candidates.next(own.number, Rank.SOFT_PINNED)
        if soft != NONE:
            return [soft]
        return self._run_of_others(own, wanted_by, Rank.SOFT_PINNED)

    def coldest_slab(self, slab_of: list[Slab | None]) -> list[int]:
        """The slots in use of a slab that may all go: of about the coldest there is."""
        coldest: list[tuple[int, int]] = []
        for size_class in self._classes.values():
            for slot in islice(self._candidates.walk(size_class.number), _LOOKED_AT):
                slab = slab_of[slot]
                if slab is not None and self._can_empty(slab, self._going(slab)):
                    coldest.append((self._touched[slot], slot))
                    break
        slab = slab_of[min(coldest)[1]] if coldest else None
        return [] if slab is None else self._going(slab)

    def _may_go(self, slot: int, wanted_by: Account | None, worst: Rank) -> bool:
        """Whether the slot's account must give, and its rank is no worse."""
        if slot not in self._candidates:
            return False
        rank = self._candidates.rank(slot)
        if rank > worst:
            return False
        if wanted_by is None or rank is Rank.EXTRA:
            return True
        owner = self._account[slot]
        return owner == wanted_by.number or self._level(slot) >= wanted_by.level

    def _better_slab(
        self,
        own: SizeClass,
        mine: int,
        wanted_by: Account | None,
        slab_of: list[Slab | None],
    ) -> Slab | None:
        """A slab of another size that goes before slot ``mine`` does.

        Its next slot is of a clearly fuller account, or of one as full and older.
        """
        age = _LAST if mine == NONE else self._touched[mine]
        level = _NO_LEVEL if mine == NONE else self._level(mine)
        number = COMMON if wanted_by is None else wanted_by.number
        best: tuple[int, int] | None = None
        slab: Slab | None = None
        for other in self._classes.values():
            if other is own:
                continue
            first = self._candidates.next(other.number, Rank.ORDINARY, number)
            if first == NONE:
                continue
            theirs = (self._level(first), -self._touched[first])
            fuller = theirs[0] > level + _FULLER
            older = theirs[0] >= level and -theirs[1] < age
            if (fuller or older) and (best is None or theirs > best):
                best, slab = theirs, slab_of[first]
        if best is None or slab is None or slab.length < own.stride:
            return None
        if not self._all_may_go(slab, wanted_by, Rank.ORDINARY):
            return None
        going = self._going(slab)
        younger = sum(1 for slot in going if self._touched[slot] > age)
        fuller = best[0] > level + _FULLER
        return slab if fuller or 2 * younger <= len(going) else None

    def _level(self, slot: int) -> int:
        return self._accounts[self._account[slot]].level

    def _run_of_others(
        self, own: SizeClass, wanted_by: Account | None, worst: Rank
    ) -> list[int]:
        """The slots of neighbouring slabs that together have room for one slot."""
        run: list[int] = []
        start = 0
        for slab in self._slabs:
            taken = slab.size_class is own
            if not self._slabs.usable(start, slab.offset):
                run, start = [], slab.offset
            if taken or not self._all_may_go(slab, wanted_by, worst):
                run, start = [], slab.offset + slab.length
                continue
            run.extend(self._going(slab))
            if slab.offset + slab.length - start >= own.stride:
                return run
        end = self._slabs.end
        enough = end - start >= own.stride and self._slabs.usable(start, end)
        return run if enough else []

    def _all_may_go(self, slab: Slab, wanted_by: Account | None, worst: Rank) -> bool:
        """Whether every slot of the slab that is in use may."""
        going = [s for s in slab.slots() if self._may_go(s, wanted_by, worst)]
        return self._can_empty(slab, going)

    def _can_empty(self, slab: Slab, going: list[int]) -> bool:
        """Whether nobody needs the slab when these slots of it are gone."""
        return len(going) == slab.busy and not slab.looks

    def _going(self, slab: Slab) -> list[int]:
        return [slot for slot in slab.slots() if slot in self._candidates]
