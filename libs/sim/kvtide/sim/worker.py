"""What workers in virtual time have in common: drivers that find bugs, not hide them."""

from typing import TypeVar

from kvtide.bus import Hop, Node
from kvtide.bus.messages import Message
from kvtide.kv import NodeRef, Role
from kvtide.sim.engine import FACTS
from kvtide.sim.kernel import Kernel, Life, SimTasks
from kvtide.sim.pool import SimPool
from kvtide.worker.driver import Driver, Machine

E = TypeVar("E")
C = TypeVar("C")


class SimWorker(Driver[E, C]):
    """Drives a machine as its shell does; what raises fails the simulation."""

    def __init__(
        self,
        kernel: Kernel,
        life: Life,
        node: Node,
        pool: SimPool,
        role: Role,
        hops: tuple[Hop, ...],
        machine: Machine[E, C],
    ) -> None:
        """Nothing is taken before ``start``."""
        super().__init__(node, role, hops, machine, SimTasks(kernel, life))
        self._kernel = kernel
        self._life = life
        self._pool = pool

    async def start(self) -> None:
        """Listen, and take work."""
        self._node.models(FACTS)
        self._tell(self._loaded())
        await self.listen()

    def _loaded(self) -> E:
        """What the machine is told of the model."""
        raise NotImplementedError

    def _store(self) -> NodeRef | None:
        return self._pool.watch()

    def _post(self, subject: str, message: Message) -> None:
        self._kernel.spawn(self._node.bus.publish(subject, message), self._life)

    def _failed(self, command: C, error: Exception) -> None:
        del command
        raise error
