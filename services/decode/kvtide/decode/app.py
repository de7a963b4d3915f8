"""The process of a decode worker."""

import asyncio

from prometheus_client import CollectorRegistry

from kvtide.decode.settings import DecodeSettings
from kvtide.decode.shell import DecodeService
from kvtide.engine.loading import LoadedModel
from kvtide.kv import Role
from kvtide.runtime import Clock
from kvtide.worker.app import serve_worker


async def serve(
    settings: DecodeSettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
    loaded: LoadedModel | None = None,
) -> None:
    """Run a decode worker until ``stop`` is set, then drain.

    ``loaded`` is the model of these settings, if it is loaded already.

    Raises:
        ConfigError: a setting can't be used, or the model can't be served.
    """
    await serve_worker(
        settings,
        (Role.DECODE,),
        lambda chassis: [DecodeService(chassis, settings)],
        stop=stop,
        registry=registry,
        clock=clock,
        loaded=loaded,
    )
