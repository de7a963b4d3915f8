"""The process of an engine's agent."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import open_node
from kvtide.bus.errors import Interrupted
from kvtide.bus.messages import NodeState
from kvtide.kv import Role
from kvtide.router.agent import EngineAgent
from kvtide.router.engine_client import EngineClient
from kvtide.router.facts import make_facts
from kvtide.router.metrics import RouterMetrics
from kvtide.router.settings import RouterSettings
from kvtide.runtime import Clock, ConfigError
from kvtide.runtime.health import HealthServer, Readiness

ROLES = (Role.PREFILL, Role.DECODE, Role.STORE)
_ASK_AGAIN_S = 1.0

T = TypeVar("T")

log = structlog.get_logger("kvtide.router")


async def serve(
    settings: RouterSettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
) -> None:
    """Make a worker of the engine at ``settings.url`` until ``stop`` is set.

    An engine that does not answer yet is waited for.

    Raises:
        Interrupted: ``stop`` was set before the engine answered.
        ConfigError: a setting is wrong, or what answers is no such engine.
    """
    folder = settings.model.expanduser()
    async with EngineClient(settings.url, settings.kind, settings.engine_key) as client:
        model = await _waited(
            lambda: client.model(settings.engine_model), settings, clock, stop
        )
        size = await _waited(client.block_tokens, settings, clock, stop)
        facts = make_facts(
            folder,
            settings.model_name or folder.name,
            max_tokens=model.max_tokens,
            engine_block_tokens=size,
            block_tokens=settings.block_tokens,
        )
        log.info("engine found", url=client.url, model=model.name, block_tokens=size)
        host = f"engine-{settings.node}"
        async with open_node(
            settings, ROLES, clock=clock, registry=registry, stop=stop, host=host
        ) as node:
            health = HealthServer(
                registry=registry,
                readiness=lambda: Readiness(node.state is NodeState.READY, node.state),
                host=settings.listen,
                port=settings.http_port,
            )
            with health:
                node.set_http(health.url)
                metrics = RouterMetrics(registry)
                agent = EngineAgent(
                    node, client, facts, settings, metrics, engine_model=model.name
                )
                await agent.start()
                try:
                    await stop.wait()
                finally:
                    node.set_state(NodeState.DRAINING)
                    await agent.close()


async def _waited(
    ask: Callable[[], Awaitable[T]],
    settings: RouterSettings,
    clock: Clock,
    stop: asyncio.Event,
) -> T:
    """The answer, asked for until there is one.

    Raises:
        Interrupted: ``stop`` was set before.
        ConfigError: there is none in time, or what answers is no such engine.
    """
    end_s = clock.monotonic() + settings.start_s
    said = False
    while not stop.is_set():
        try:
            return await ask()
        except (httpx.HTTPError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if clock.monotonic() > end_s:
                raise ConfigError(
                    f"the engine at {settings.url} does not answer: {reason}", key="url"
                ) from error
            if not said:
                log.warning("waiting for the engine", url=settings.url, reason=reason)
                said = True
            await clock.sleep(_ASK_AGAIN_S)
    raise Interrupted("asked to stop while waiting for the engine")
