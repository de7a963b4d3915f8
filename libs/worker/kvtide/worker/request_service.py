"""A worker on an engine of others, which runs whole requests by itself."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry

from kvtide.bus import Hop, Node
from kvtide.engine.errors import EngineError
from kvtide.engine.serving import RequestEngine, Served
from kvtide.kv import ModelFacts, NodeRef, Role
from kvtide.pool import PoolClient
from kvtide.worker.metrics import WorkerMetrics
from kvtide.worker.role_service import IdleMachine, RoleService
from kvtide.worker.turning import RoleKeeper

E = TypeVar("E")
C = TypeVar("C")


@dataclass(slots=True)
class RequestChassis:
    """What the services of such a worker's process share; another owns it."""

    node: Node
    engine: RequestEngine
    pool: PoolClient
    registry: CollectorRegistry
    roles: RoleKeeper | None = None


class RequestService(RoleService[E, C]):
    """One role of such a worker."""

    def __init__(
        self,
        chassis: RequestChassis,
        role: Role,
        hops: Sequence[Hop],
        machine: IdleMachine[E, C],
        metrics: WorkerMetrics,
        *,
        drain_s: float,
    ) -> None:
        """Nothing runs before ``start``."""
        super().__init__(chassis, role, hops, machine, metrics, drain_s=drain_s)
        self._engine = chassis.engine

    def _store(self) -> NodeRef | None:
        # such an engine computes what it can't load: it serves on without a store
        return self._node.ref

    @abstractmethod
    def _loaded(self, served: Served) -> E:
        """What the machine is told of the model."""

    async def _wait_loaded(self) -> tuple[Sequence[ModelFacts], E] | None:
        try:
            served = await self._engine.served()
        except EngineError:
            return None
        return (served.facts, *served.adapted), self._loaded(served)
