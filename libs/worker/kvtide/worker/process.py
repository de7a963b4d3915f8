"""The process of a worker: one node, engine and pool under the services of its roles."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry

from kvtide.bus import Node, open_node
from kvtide.bus.messages import NodeState
from kvtide.engine.errors import EngineError
from kvtide.engine.settings import WorkerSettings
from kvtide.kv import Role
from kvtide.pool import PoolClient
from kvtide.runtime import Clock, ConfigError, TaskScope
from kvtide.runtime.health import HealthServer, Readiness
from kvtide.worker.role_service import Frame
from kvtide.worker.turning import RoleKeeper, Turnable

F = TypeVar("F", bound=Frame)


class Service(Turnable, Protocol):
    """What a process starts and ends for each role."""

    async def start(self) -> None:
        """Begin; returns at once."""
        ...

    async def close(self) -> None:
        """Drain, then end everything."""
        ...


class ServedEngine(Protocol):
    """What a process has to know of its engine."""

    def start(self) -> None:
        """Begin to load; returns at once."""
        ...

    async def close(self) -> None:
        """End it, in bounded time."""
        ...

    async def failed_or(self, stop: asyncio.Event) -> None:
        """Wait until ``stop`` is set.

        Raises:
            EngineError: the model can't be loaded, or the engine has ended by itself.
        """
        ...


async def serve_roles(
    settings: WorkerSettings,
    roles: tuple[Role, ...],
    engine: ServedEngine,
    frame_of: Callable[[Node, PoolClient], F],
    services: Callable[[F], Sequence[Service]],
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
) -> None:
    """Run ``services``, one for each role, until ``stop`` is set, then drain them.

    The last one is drained first. Of several roles, some can be left for a while.

    Raises:
        ConfigError: a setting can't be used, or the model can't be served.
    """
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(
            open_node(settings, roles, clock=clock, registry=registry, stop=stop)
        )
        health = HealthServer(
            registry=registry,
            readiness=lambda: Readiness(node.state is NodeState.READY, node.state),
            host=settings.listen,
            port=settings.http_port,
        )
        stack.enter_context(health)
        node.set_http(health.url)
        node.set_worker_class(settings.worker_class)
        pool = await stack.enter_async_context(PoolClient(node, registry=registry))
        engine.start()
        stack.push_async_callback(engine.close)
        frame = frame_of(node, pool)
        serving = services(frame)
        if len(roles) > 1:
            by_role = dict(zip(roles, serving, strict=True))
            frame.roles = RoleKeeper(node, by_role)
            tasks = await stack.enter_async_context(TaskScope())
            tasks.spawn(frame.roles.watch(), name="roles")
        for service in serving:
            stack.push_async_callback(service.close)
            await service.start()
        try:
            await engine.failed_or(stop)
        except EngineError as error:
            raise ConfigError(str(error), key="model") from error
