"""A worker on an engine of ours: the services of its roles share its thread and steps."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import CollectorRegistry

from kvtide.bus import Hop, Node
from kvtide.engine.errors import EngineError
from kvtide.engine.loading import LoadedModel
from kvtide.engine.memory import KEY, VALUE, KvRun
from kvtide.engine.thread import EngineThread
from kvtide.kv import KeySpace, ModelFacts, Role, SpaceId
from kvtide.pool import PartSink, PoolClient
from kvtide.worker.custody import Work
from kvtide.worker.metrics import WorkerMetrics
from kvtide.worker.mixing import StepMixer
from kvtide.worker.role_service import FIRST_STAGE, IdleMachine, RoleService
from kvtide.worker.turning import RoleKeeper

E = TypeVar("E")
C = TypeVar("C")

__all__ = ["FIRST_STAGE", "Chassis", "OpenRun", "WorkerService"]


@dataclass(slots=True)
class Chassis:
    """What the services of a worker's process share; another owns it."""

    node: Node
    engine: EngineThread
    pool: PoolClient
    registry: CollectorRegistry
    steps: StepMixer = field(init=False)
    roles: RoleKeeper | None = None

    def __post_init__(self) -> None:
        """Steps of all services are mixed."""
        self.steps = StepMixer(self.engine, self.node.clock)


@dataclass(slots=True)
class OpenRun:
    """The memory of one sequence, and the key space that it is in."""

    space: KeySpace
    run: KvRun

    def sink(self, block: int) -> PartSink:
        """Where the parts of a block go."""
        size = self.space.layout.block_tokens

        def part(number: int) -> memoryview:
            layer, kind = divmod(number, 2)
            start = block * size
            return self.run.part(layer, VALUE if kind else KEY, start, start + size)

        return part


class WorkerService(RoleService[E, C]):
    """One role of a worker whose engine is ours."""

    def __init__(
        self,
        chassis: Chassis,
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
        self._steps = chassis.steps
        self._model: LoadedModel | None = None

    @abstractmethod
    def _loaded(self, model: LoadedModel) -> E:
        """What the machine is told of the model."""

    async def _wait_loaded(self) -> tuple[Sequence[ModelFacts], E] | None:
        try:
            model = await self._engine.model()
        except EngineError:
            return None
        self._model = model
        return (model.facts,), self._loaded(model)

    def _space(self, work: Work) -> KeySpace:
        space = SpaceId(work.tenant, self._loaded_model.facts, work.salt)
        return KeySpace(self._node.secret, space)

    @property
    def _loaded_model(self) -> LoadedModel:
        assert self._model is not None  # noqa: S101 - the machine waits for it
        return self._model
