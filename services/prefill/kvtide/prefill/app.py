"""The process of a prefill worker."""

import asyncio

from prometheus_client import CollectorRegistry

from kvtide.bus import open_node
from kvtide.bus.messages import NodeState
from kvtide.engine.errors import EngineError
from kvtide.engine.worker import engine_of
from kvtide.kv import Role
from kvtide.pool import PoolClient
from kvtide.prefill.settings import PrefillSettings
from kvtide.prefill.shell import PrefillService
from kvtide.runtime import Clock, ConfigError
from kvtide.runtime.health import HealthServer, Readiness


async def serve(
    settings: PrefillSettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
) -> None:
    """Run a prefill worker until ``stop`` is set, then drain.

    Raises:
        ConfigError: a setting can't be used, or the model can't be served.
    """
    roles = (Role.PREFILL,)
    async with open_node(
        settings, roles, clock=clock, registry=registry, stop=stop
    ) as node:

        def readiness() -> Readiness:
            return Readiness(node.state is NodeState.READY, node.state)

        health = HealthServer(
            registry=registry,
            readiness=readiness,
            host=settings.listen,
            port=settings.http_port,
        )
        engine = engine_of(settings)
        with health:
            node.set_http(health.url)
            async with PoolClient(node, registry=registry) as pool:
                engine.start()
                service = PrefillService(node, engine, pool, settings, registry)
                await service.start()
                try:
                    await engine.failed_or(stop)
                except EngineError as error:
                    raise ConfigError(str(error), key="model") from error
                finally:
                    await service.close()
                    await engine.close()
