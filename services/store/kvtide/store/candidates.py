"""Which slots may go, and which of those goes next: extras, then by share and policy.

A candidate stands in one line of the eviction policy: that of the extra copies or that
of the softly pinned blocks of its size, or that of its size and its tenant. Everything
takes constant time.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from kvtide.store.accounts import COMMON, Account, Accounts
from kvtide.store.eviction import NONE, Eviction


class Rank(IntEnum):
    """Lower ones go first."""

    EXTRA = 0
    ORDINARY = 1
    SOFT_PINNED = 2


@dataclass(slots=True)
class _Line:
    """A line of the policy. ``account`` is ``COMMON`` unless the line is a tenant's."""

    number: int
    size_class: int
    rank: Rank
    account: int
    length: int = 0


class _Levels:
    """Accounts by level, the highest first; within one the longest inactive first."""

    def __init__(self) -> None:
        self._bits = 0
        self._at: dict[int, dict[int, None]] = {}
        self._level: dict[int, int] = {}

    def put(self, account: int, level: int) -> None:
        """Stand last at the level."""
        self.take(account)
        self._level[account] = level
        self._bits |= 1 << level
        self._at.setdefault(level, {})[account] = None

    def take(self, account: int) -> None:
        """Stand nowhere."""
        level = self._level.pop(account, None)
        if level is None:
            return
        there = self._at[level]
        del there[account]
        if not there:
            del self._at[level]
            self._bits ^= 1 << level

    def first(self, preferred: int) -> int | None:
        """Whose turn it is: among those at the highest level ``preferred``, if there."""
        if not self._bits:
            return None
        highest = self._at[self._bits.bit_length() - 1]
        return preferred if preferred in highest else next(iter(highest))


class Candidates:
    """See the module."""

    def __init__(self, policy: Eviction, accounts: Accounts) -> None:
        """No slots and no sizes yet."""
        self.policy = policy
        self.accounts = accounts
        self._line = array("i")
        self._lines: dict[int, _Line] = {}
        self._by_place: dict[tuple[int, Rank, int], _Line] = {}
        self._levels: list[_Levels] = []
        self._classes_of: dict[int, set[int]] = {}

    def add_slots(self, count: int) -> None:
        """Make room for ``count`` more slots."""
        self.policy.add_slots(count)
        self._line.extend([NONE] * count)

    def add_class(self) -> None:
        """There is one more size of slots."""
        self._levels.append(_Levels())

    def __contains__(self, slot: int) -> bool:
        """Whether the slot may go."""
        return self._line[slot] != NONE

    def rank(self, slot: int) -> Rank:
        """Of a slot that may go."""
        return self._lines[self._line[slot]].rank

    # ---- coming and going

    def enter(self, slot: int, size_class: int, account: Account, rank: Rank) -> None:
        """The slot may go from now on."""
        owner = self._owner(account, rank)
        line = self._by_place.get((size_class, rank, owner))
        if line is None:
            line = _Line(self.policy.add_line(), size_class, rank, owner)
            self._by_place[size_class, rank, owner] = line
            self._lines[line.number] = line
        if line.length == 0 and rank is Rank.ORDINARY:
            self._levels[size_class].put(owner, self._level(account, owner))
            self._classes_of.setdefault(owner, set()).add(size_class)
        line.length += 1
        self._line[slot] = line.number
        self.policy.enter(line.number, slot)

    def leave(self, slot: int) -> None:
        """The slot may not go for now, or is gone."""
        self.policy.leave(slot)
        self._left(slot)

    def evict(self, slot: int, identity: int) -> None:
        """The slot goes to make room."""
        self.policy.evict(slot, identity)
        self._left(slot)

    def use(self, slot: int, account: Account) -> None:
        """The slot was used again, whether it may go or not."""
        self.policy.use(slot)
        self.moved(account)

    def moved(self, account: Account) -> None:
        """The account's level is another one, or it was active."""
        owner = self._owner(account, Rank.ORDINARY)
        for size_class in self._classes_of.get(owner, ()):
            self._levels[size_class].put(owner, self._level(account, owner))

    # ---- who goes

    def next(self, size_class: int, rank: Rank, wanted_by: int = COMMON) -> int:
        """The next of that size and rank, or ``NONE``; of equals ``wanted_by`` first."""
        owner: int | None = COMMON
        if rank is Rank.ORDINARY:
            preferred = wanted_by if self.accounts.rules.fair else NONE
            owner = self._levels[size_class].first(preferred)
        if owner is None:
            return NONE
        line = self._by_place.get((size_class, rank, owner))
        return NONE if line is None else self.policy.next(line.number)

    def next_of(self, account: Account, size_class: int) -> int:
        """The next of one tenant, of that size if there is one; or ``NONE``."""
        owner = self._owner(account, Rank.ORDINARY)
        if owner == COMMON:
            return NONE
        classes = self._classes_of.get(owner, set())
        for number in (size_class, *classes):
            line = self._by_place.get((number, Rank.ORDINARY, owner))
            if line is not None:
                return self.policy.next(line.number)
        return NONE

    def walk(self, size_class: int) -> Iterator[int]:
        """The candidates of a size about in the order in which they would go."""
        found = [line for line in self._lines.values() if line.size_class == size_class]
        for line in sorted(found, key=self._turn):
            yield from self.policy.walk(line.number)

    def _turn(self, line: _Line) -> tuple[int, int]:
        level = 0
        if line.account != COMMON:
            level = self.accounts[line.account].level
        return line.rank, -level

    # ---- inside

    def _owner(self, account: Account, rank: Rank) -> int:
        own = self.accounts.rules.fair or account.limit_bytes is not None
        return account.number if own and rank is Rank.ORDINARY else COMMON

    def _level(self, account: Account, owner: int) -> int:
        return 0 if owner == COMMON else account.level

    def _left(self, slot: int) -> None:
        line = self._lines[self._line[slot]]
        self._line[slot] = NONE
        line.length -= 1
        if line.length:
            return
        self.policy.drop_line(line.number)
        del self._lines[line.number]
        del self._by_place[line.size_class, line.rank, line.account]
        if line.rank is Rank.ORDINARY:
            self._levels[line.size_class].take(line.account)
            classes = self._classes_of[line.account]
            classes.discard(line.size_class)
            if not classes:
                del self._classes_of[line.account]
