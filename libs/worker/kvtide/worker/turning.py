"""Turns the roles of a worker's process when a conductor says so."""

from collections.abc import Mapping
from typing import Protocol

import structlog

from kvtide.bus import Node
from kvtide.bus.messages import Ack, ChangeRoles, Failure
from kvtide.kv import Role
from kvtide.worker.driver import TICK_S
from kvtide.worker.roles import Begin, Leave, Offer, RoleCommand, RoleMachine

log = structlog.get_logger("kvtide.worker")


class Turnable(Protocol):
    """One role's service."""

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is held."""
        ...

    def take_work(self, *, taken: bool) -> None:
        """Take new work, or none; what is there goes on."""
        ...


class RoleKeeper:
    """The roles of one process; ``watch`` is to run as long as it does."""

    def __init__(self, node: Node, services: Mapping[Role, Turnable]) -> None:
        """All of these roles are done, until somebody says otherwise."""
        self._node = node
        self._services = services
        self._machine = RoleMachine(services)

    @property
    def draining(self) -> frozenset[Role]:
        """Roles that take no work, and are not at their end yet."""
        return self._machine.draining

    def change(self, message: ChangeRoles) -> Ack | Failure:
        """Answer a ``ChangeRoles``."""
        if message.worker != self._node.ref:
            reason = "it was meant for another life of this worker"
            return Failure(code="other_life", reason=reason)
        try:
            commands = self._machine.want(message.roles)
        except ValueError as error:
            return Failure(code="unable", reason=str(error))
        self._carry_out(commands)
        return Ack()

    async def watch(self) -> None:
        """Begin what is wanted when what was left has drained."""
        while True:
            idle = [
                role for role in self._machine.draining if self._services[role].idle
            ]
            self._carry_out(self._machine.drained(idle))
            await self._node.clock.sleep(TICK_S)

    def _carry_out(self, commands: list[RoleCommand]) -> None:
        for command in commands:
            match command:
                case Leave(role):
                    self._services[role].take_work(taken=False)
                case Begin(role):
                    self._services[role].take_work(taken=True)
                case Offer(roles):
                    self._node.set_roles(roles)
                    log.info("roles changed", roles=[str(role) for role in roles])
