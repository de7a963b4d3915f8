"""Whose blocks fill the arena: an account for each tenant that has a block. Pure.

How far a tenant is above its share is a level: the logarithm of its bytes over its
weight, in steps of about 4.5 %. Room is made at the highest level first, so the room that
is there is shared as max-min fairness has it: nobody is pushed below an equal share by
others, and what one does not use the others have.

A tenant that has neither put nor used a block for a while has no share: its level is
the highest there is until it comes back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

COMMON = 0
"""The account whose level all share where shares are not fair."""

IDLE_LEVEL = 1 << 10
_STEPS_LOG2 = 4
_WEIGHT_UNIT = 1 << 10


@dataclass(frozen=True, slots=True)
class ShareRules:
    """How tenants, by tag, share the arena.

    ``fair`` false: the longest unused goes first, whoever's it is. ``weights`` of 1 are
    the default. ``limits_bytes`` bound a tenant even while there is room.
    """

    fair: bool = True
    idle_s: float = 600.0
    weights: Mapping[bytes, float] = field(default_factory=dict[bytes, float])
    limits_bytes: Mapping[bytes, int] = field(default_factory=dict[bytes, int])


@dataclass(slots=True)
class Account:
    """One tenant's. ``used_bytes`` counts its slots in use but no extra copies."""

    number: int
    tag: bytes
    weight: int
    limit_bytes: int | None
    slots: int = 0
    used_bytes: int = 0
    level: int = 0
    active_s: float = 0.0
    idle: bool = False


class Accounts:
    """Accounts by number. One lives as long as it has a slot."""

    def __init__(self, rules: ShareRules) -> None:
        """Nobody has a block."""
        self.rules = rules
        self._by_number: dict[int, Account] = {}
        self._numbers: dict[bytes, int] = {}
        self._free: list[int] = []
        # by when they were last active; idle ones are not here
        self._active: dict[int, None] = {}

    def __len__(self) -> int:
        """Accounts that have a slot."""
        return len(self._by_number)

    def __getitem__(self, number: int) -> Account:
        """The account with that number, which has a slot."""
        return self._by_number[number]

    def find(self, tag: bytes) -> Account | None:
        """A tenant's account, if it has a slot."""
        number = self._numbers.get(tag)
        return None if number is None else self._by_number[number]

    def join(self, tag: bytes) -> Account:
        """One slot more is of this tenant."""
        account = self.find(tag)
        if account is None:
            number = self._free.pop() if self._free else len(self._by_number) + 1
            account = Account(
                number=number,
                tag=tag,
                weight=max(1, round(self.rules.weights.get(tag, 1.0) * _WEIGHT_UNIT)),
                limit_bytes=self.rules.limits_bytes.get(tag),
            )
            self._numbers[tag] = number
            self._by_number[number] = account
            self._active[number] = None
        account.slots += 1
        return account

    def leave(self, account: Account) -> None:
        """One slot less is of it; without any it ends."""
        account.slots -= 1
        if account.slots == 0:
            del self._by_number[account.number], self._numbers[account.tag]
            self._active.pop(account.number, None)
            self._free.append(account.number)

    def charge(self, account: Account, change_bytes: int) -> bool:
        """It has more or fewer bytes; whether its level is another now."""
        account.used_bytes += change_bytes
        return self._relevel(account)

    def active(self, account: Account, now_s: float) -> bool:
        """It puts or uses a block; whether its level is another now."""
        account.active_s, account.idle = now_s, False
        self._active.pop(account.number, None)
        self._active[account.number] = None
        return self._relevel(account)

    def next_idle(self, now_s: float) -> Account | None:
        """An account that became idle by now, its level is another; None: no more."""
        number = next(iter(self._active), None)
        if number is None:
            return None
        account = self._by_number[number]
        if account.active_s + self.rules.idle_s > now_s:
            return None
        del self._active[number]
        account.idle = True
        self._relevel(account)
        return account

    def over_limit(self, account: Account, more_bytes: int) -> bool:
        """Whether ``more_bytes`` would be more than the tenant may have."""
        limit = account.limit_bytes
        return limit is not None and account.used_bytes + more_bytes > limit

    def _relevel(self, account: Account) -> bool:
        before = account.level
        if not self.rules.fair:
            account.level = 0
        elif account.idle:
            account.level = IDLE_LEVEL
        else:
            account.level = _level(account.used_bytes * _WEIGHT_UNIT // account.weight)
        return account.level != before


def _level(value: int) -> int:
    """The logarithm to the base of two, with ``_STEPS_LOG2`` bits after the point."""
    if value <= 0:
        return 0
    whole = value.bit_length() - 1
    digits = value >> whole - _STEPS_LOG2 if whole >= _STEPS_LOG2 else 0
    return (whole << _STEPS_LOG2) + (digits & (1 << _STEPS_LOG2) - 1)
