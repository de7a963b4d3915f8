"""The process of a prefill worker."""

import asyncio

from prometheus_client import CollectorRegistry

from kvtide.engine.loading import LoadedModel
from kvtide.kv import Role
from kvtide.prefill.settings import PrefillSettings
from kvtide.prefill.shell import PrefillService
from kvtide.runtime import Clock
from kvtide.worker.app import serve_worker


async def serve(
    settings: PrefillSettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
    loaded: LoadedModel | None = None,
) -> None:
    """Run a prefill worker until ``stop`` is set, then drain.

    ``loaded`` is the model of these settings, if it is loaded already.

    Raises:
        ConfigError: a setting can't be used, or the model can't be served.
    """
    await serve_worker(
        settings,
        (Role.PREFILL,),
        lambda chassis: [PrefillService(chassis, settings)],
        stop=stop,
        registry=registry,
        clock=clock,
        loaded=loaded,
    )
