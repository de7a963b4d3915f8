"""The process of a worker whose engine is ours."""

import asyncio
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from kvtide.bus import Node
from kvtide.engine.loading import LoadedModel
from kvtide.engine.settings import WorkerSettings
from kvtide.engine.worker import engine_of
from kvtide.kv import Role
from kvtide.pool import PoolClient
from kvtide.runtime import Clock
from kvtide.worker.process import Service, serve_roles
from kvtide.worker.service import Chassis


async def serve_worker(
    settings: WorkerSettings,
    roles: tuple[Role, ...],
    services: Callable[[Chassis], Sequence[Service]],
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
    loaded: LoadedModel | None = None,
) -> None:
    """``serve_roles`` on an engine of ours.

    ``loaded`` is the model of these settings, if it is loaded already.

    Raises:
        ConfigError: a setting can't be used, or the model can't be served.
    """
    engine = engine_of(settings, loaded)

    def chassis(node: Node, pool: PoolClient) -> Chassis:
        return Chassis(node, engine, pool, registry)

    await serve_roles(
        settings,
        roles,
        engine,
        chassis,
        services,
        stop=stop,
        registry=registry,
        clock=clock,
    )
