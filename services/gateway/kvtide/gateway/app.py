"""One gateway process, from its settings to its clean end."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import Node, open_node
from kvtide.bus.messages import NodeState
from kvtide.gateway.access.opening import open_access
from kvtide.gateway.access.tls import check_tls
from kvtide.gateway.api.application import make_application
from kvtide.gateway.api.door import Door
from kvtide.gateway.metrics import GatewayMetrics
from kvtide.gateway.served import ServedModel
from kvtide.gateway.server import HttpServer
from kvtide.gateway.settings import GatewaySettings
from kvtide.gateway.shell import Gateway
from kvtide.gateway.ui import Dashboard
from kvtide.gateway.workload import WorkloadLog
from kvtide.kv import BlockIds, Role, TenantId
from kvtide.runtime import Clock, TaskScope

DRAIN_TICK_S = 0.05

log = structlog.get_logger("kvtide.gateway")


async def serve(
    settings: GatewaySettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
) -> None:
    """Serve until ``stop`` is set; open requests then get ``drain_s`` to finish.

    Raises:
        ConfigError: a setting is wrong (port, secret, node).
        ModelTextError: the model's folder has no usable tokenizer.
    """
    async with open_node(
        settings, (Role.GATEWAY,), clock=clock, registry=registry, stop=stop
    ) as node:
        await serve_on(node, settings, stop=stop, registry=registry)


async def serve_on(
    node: Node,
    settings: GatewaySettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    ready: asyncio.Future[str] | None = None,
) -> None:
    """Serve on an open node. ``ready`` gets the URL once requests are taken."""
    metrics = GatewayMetrics(registry)
    workload = _workload_log(settings, node)
    gateway = Gateway(
        node,
        settings.limits,
        metrics,
        max_open_requests=settings.max_open_requests,
        max_open_picture_bytes=settings.max_open_picture_bytes,
        quarantine_s=settings.quarantine_s,
    )
    if workload is not None:
        gateway.observe(workload)
    tls = check_tls(settings.tls_cert, settings.tls_key)
    with ThreadPoolExecutor(settings.text_threads, "text") as executor:
        folder = settings.model.expanduser()
        served = await ServedModel.open(settings.served_name, folder, node, executor)
        async with (
            open_access(settings, clock=node.clock, registry=registry) as desk,
            _published(settings, gateway),
            TaskScope() as scope,
        ):
            door = Door(settings, gateway, served, metrics, desk)
            dashboard = Dashboard(
                gateway, desk.catalog, workload_log=_log_path(settings)
            )
            app = make_application(door, registry, dashboard.routes())
            limits = settings.connection_limits
            server = HttpServer(
                app, settings.listen, settings.http_port, limits, tls=tls
            )
            await gateway.start()
            await dashboard.start()
            if workload is not None:
                scope.spawn(workload.run(), name="workload log")
            serving = scope.spawn(server.run(), name="http")
            node.set_http(server.url)
            node.set_state(NodeState.READY)
            log.info("gateway open", url=server.url, model=served.name)
            if ready is not None:
                ready.set_result(server.url)
            stopping = scope.spawn(stop.wait(), name="stop")
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            await _drain(gateway, settings.drain_s)
            server.stop()
            await serving
    if workload is not None:
        await workload.flush()
    log.info("gateway closed")


def _workload_log(settings: GatewaySettings, node: Node) -> WorkloadLog | None:
    path = _log_path(settings)
    if path is None:
        return None
    ids, most_bytes = BlockIds(node.secret), settings.workload_log_bytes
    return WorkloadLog(path, ids, node.clock, most_bytes=most_bytes)


@asynccontextmanager
async def _published(
    settings: GatewaySettings, gateway: Gateway
) -> AsyncGenerator[None]:
    """What the pool holds is published meanwhile, if a setting says where.

    Raises:
        ConfigError: an address can't be bound.
    """
    if not settings.kv_events:
        yield
        return
    # these load ZeroMQ
    from kvtide.connect.kv_publisher import KvPublisher  # noqa: PLC0415
    from kvtide.gateway.pool_feed import PoolFeed  # noqa: PLC0415

    node = gateway.node
    publisher = KvPublisher(
        settings.kv_events,
        settings.kv_events_replay,
        settings.kv_events_topic,
        node.clock,
    )
    feed = PoolFeed(node, publisher, TenantId(settings.tenant))
    try:
        await feed.start()
        gateway.observe(feed)
        async with TaskScope() as scope:
            scope.spawn(feed.run(), name="kv events")
            yield
    finally:
        await feed.close()


def _log_path(settings: GatewaySettings) -> Path | None:
    path = settings.workload_log
    return None if path is None else path.expanduser()


async def _drain(gateway: Gateway, limit_s: float) -> None:
    """Readiness first, then open requests finish; what is left then is ended."""
    gateway.drain()
    clock = gateway.node.clock
    deadline_s = clock.monotonic() + limit_s
    while gateway.open_requests and clock.monotonic() < deadline_s:
        await clock.sleep(DRAIN_TICK_S)
    await gateway.close()
