"""Which roles a worker does, and how it changes them: what it leaves is drained first. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtide.kv import Role


@dataclass(frozen=True, slots=True)
class Leave:
    """Take no new work of this role; what it has goes on to its end."""

    role: Role


@dataclass(frozen=True, slots=True)
class Begin:
    """Take work of this role."""

    role: Role


@dataclass(frozen=True, slots=True)
class Offer:
    """Let others see that the worker takes work of these roles."""

    roles: tuple[Role, ...]


RoleCommand = Leave | Begin | Offer


class RoleMachine:
    """``wanted`` roles begin when all that are left have drained.

    A role that is wanted again while it drains begins again at once.
    """

    def __init__(self, able: Iterable[Role]) -> None:
        """It does all that it is able to."""
        self.able = frozenset(able)
        self.offered = self.able
        self.wanted = self.able
        self.draining: frozenset[Role] = frozenset()

    def want(self, roles: Iterable[Role]) -> list[RoleCommand]:
        """Do these from now on.

        Raises:
            ValueError: none, or one that it is not able to do.
        """
        wanted = frozenset(roles)
        if not wanted or not wanted <= self.able:
            able = ", ".join(sorted(self.able))
            raise ValueError(f"this worker can do: {able}; at least one of them")
        self.wanted = wanted
        left = self.offered - wanted
        again = self.draining & wanted
        self.draining = (self.draining | left) - again
        commands: list[RoleCommand] = [Leave(role) for role in sorted(left)]
        commands += [Begin(role) for role in sorted(again)]
        commands += self._offer((self.offered - left) | again)
        return commands + self._begin()

    def drained(self, roles: Iterable[Role]) -> list[RoleCommand]:
        """Nothing is left of these."""
        done = self.draining & frozenset(roles)
        self.draining -= done
        return self._begin() if done else []

    def _begin(self) -> list[RoleCommand]:
        new = self.wanted - self.offered
        if self.draining or not new:
            return []
        begun: list[RoleCommand] = [Begin(role) for role in sorted(new)]
        return begun + self._offer(self.offered | new)

    def _offer(self, roles: frozenset[Role]) -> list[RoleCommand]:
        if roles == self.offered:
            return []
        self.offered = roles
        return [Offer(tuple(sorted(roles)))]
