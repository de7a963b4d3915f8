"""The process of a conductor."""

import asyncio

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import Node, open_node
from kvtide.bus.messages import NodeState
from kvtide.catalog import (
    Catalog,
    CatalogError,
    CatalogRevisionError,
    Cutoffs,
    Writer,
    catalog_url,
)
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.quotas import follow_quotas
from kvtide.conductor.settings import ConductorSettings
from kvtide.conductor.shell import ConductorService
from kvtide.conductor.warming import warm
from kvtide.kv import Role
from kvtide.runtime import Clock, TaskScope
from kvtide.runtime.health import HealthServer, Readiness

_MIGRATION_LIMIT_S = 10.0
_DAY_S = 86_400.0

_log = structlog.get_logger("kvtide.conductor")


async def serve(
    settings: ConductorSettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
) -> None:
    """Run a conductor until ``stop`` is set.

    Serves without its catalog while that is down, and writes to it once it is back.

    Raises:
        ConfigError: a setting can't be used, or the catalog is of a newer version.
    """
    url = catalog_url(settings.catalog, settings.state_dir)
    async with Catalog.open(url) as catalog, TaskScope() as tasks:
        await _migrate(catalog)
        services: list[ConductorService] = []

        def repair() -> None:
            for service in services:
                service.record_members()

        writer = Writer(catalog, clock=clock, on_repair=repair)
        writer.register(registry, "conductor")
        writer.start()
        tasks.spawn(_prune(catalog, clock, settings), name="prune")
        try:
            roles = (Role.CONDUCTOR,)
            async with open_node(
                settings, roles, clock=clock, registry=registry, stop=stop
            ) as node:
                dispatcher = Dispatcher(
                    node.ref,
                    policy=settings.placement(),
                    replication=settings.replication(),
                    serving=settings.serving(),
                )
                service = ConductorService(node, dispatcher, writer, registry)
                services.append(service)
                with _health(settings, node, service, writer, registry) as health:
                    node.set_http(health.url)
                    await service.look()
                    # asked before others were heard it would refuse for want of
                    # workers, and grant anew what another conductor has granted
                    await node.hear_others()
                    await service.start()
                    tasks.spawn(warm(catalog, node, dispatcher), name="warm index")
                    quotas = follow_quotas(
                        catalog,
                        service.take_quotas,
                        clock,
                        every_s=settings.quotas_every_s,
                    )
                    tasks.spawn(quotas, name="quotas")
                    try:
                        await stop.wait()
                    finally:
                        await service.close()
        finally:
            await writer.close()


def _health(
    settings: ConductorSettings,
    node: Node,
    service: ConductorService,
    writer: Writer,
    registry: CollectorRegistry,
) -> HealthServer:
    def readiness() -> Readiness:
        index = "exact" if service.exact else "catching up"
        catalog = "available" if writer.available else "not available"
        ready = node.state is NodeState.READY
        return Readiness(ready, node.state, {"index": index, "catalog": catalog})

    def scaling() -> object:
        # who hears no worker knows nothing: an autoscaler is to keep what it has
        known = any(each.workers for each in service.advice)
        if not known or node.state is not NodeState.READY:
            return None
        # by role, so that an autoscaler can name the number it follows
        return {
            each.role.value: {
                "load": round(each.load, 4),
                "workers": each.workers,
                "wanted": each.wanted,
            }
            for each in service.advice
        }

    return HealthServer(
        registry=registry,
        readiness=readiness,
        pages={"/scaling": scaling},
        host=settings.listen,
        port=settings.http_port,
    )


async def _migrate(catalog: Catalog) -> None:
    """A schema that this program doesn't know ends it; a database that is down not."""
    try:
        async with asyncio.timeout(_MIGRATION_LIMIT_S):
            await catalog.migrate()
    except CatalogRevisionError:
        raise
    except (CatalogError, TimeoutError) as error:
        _log.warning("catalog_unavailable", why=str(error))


async def _prune(catalog: Catalog, clock: Clock, settings: ConductorSettings) -> None:
    """One of the conductors would do; that several do it costs little."""
    while True:
        try:
            pruned = await catalog.prune(_cutoffs(settings, clock.wall()))
        except CatalogError as error:
            _log.info("catalog_not_pruned", why=str(error))
        else:
            _log.debug("catalog_pruned", rows=pruned)
        await clock.sleep(settings.prune_every_s)


def _cutoffs(settings: ConductorSettings, wall_s: float) -> Cutoffs:
    return Cutoffs(
        requests_s=wall_s - settings.retention_days * _DAY_S,
        removals_s=wall_s - settings.removals_retention_days * _DAY_S,
        lost_s=wall_s - settings.prune_every_s,
        nodes_s=wall_s - settings.retention_days * _DAY_S,
        tenants_s=wall_s - settings.tenants_retention_days * _DAY_S,
        audit_s=wall_s - settings.audit_retention_days * _DAY_S,
    )
