"""``kvtide worker --engine vllm``: the roles of a worker on vLLM's own engine."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtide.bus import Node
from kvtide.cli.resolve import resolve
from kvtide.cli.roles import VLLM
from kvtide.cli.running import run_process
from kvtide.connect.connector_metrics import ConnectorMetrics
from kvtide.connect.vllm_worker.settings import VllmSettings, prepare_environment
from kvtide.decode.limits import DecodeLimits
from kvtide.kv import Role
from kvtide.pool import PoolClient
from kvtide.prefill.limits import PrefillLimits
from kvtide.runtime import ConfigError, SystemClock, random_node_name


def run_vllm(
    roles: tuple[Role, ...], config: Path | None, flags: Mapping[str, object]
) -> int:
    """Run until a signal; the exit code.

    Raises:
        ConfigError: a setting is wrong, or vLLM is not installed here.
    """
    given = {"node": random_node_name("worker"), **flags}
    settings = resolve(VllmSettings, VLLM, config, given)
    prepare_environment(settings)

    async def serving(stop: asyncio.Event, registry: CollectorRegistry) -> None:
        await _serve(settings, roles, stop, registry)

    return run_process("worker", settings, serving)


async def _serve(
    settings: VllmSettings,
    roles: tuple[Role, ...],
    stop: asyncio.Event,
    registry: CollectorRegistry,
) -> None:
    """One node and one vLLM under the services of these roles."""
    # these load torch, and vLLM
    try:
        from kvtide.connect.vllm_worker.engine import VllmEngine  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"vLLM can't be loaded here ({error}): run kvtide in vLLM's environment",
            key="engine",
        ) from error
    from kvtide.decode.answering_service import AnsweringService  # noqa: PLC0415
    from kvtide.prefill.preparing_service import PreparingService  # noqa: PLC0415
    from kvtide.worker.process import Service, serve_roles  # noqa: PLC0415
    from kvtide.worker.request_service import RequestChassis  # noqa: PLC0415

    engine = VllmEngine(settings, ConnectorMetrics(registry))

    def chassis(node: Node, pool: PoolClient) -> RequestChassis:
        return RequestChassis(node, engine, pool, registry)

    def services(shared: RequestChassis) -> Sequence[Service]:
        prefill = PrefillLimits(jobs=settings.max_requests)
        decode = DecodeLimits(batch=settings.max_requests, waiting=0)
        made: dict[Role, Service] = {}
        if Role.PREFILL in roles:
            made[Role.PREFILL] = PreparingService(
                shared, prefill, drain_s=settings.drain_s
            )
        if Role.DECODE in roles:
            made[Role.DECODE] = AnsweringService(
                shared, decode, drain_s=settings.drain_s
            )
        return [made[role] for role in roles]

    await serve_roles(
        settings,
        roles,
        engine,
        chassis,
        services,
        stop=stop,
        registry=registry,
        clock=SystemClock(),
    )
