"""The process of a store."""

import asyncio
from collections.abc import Iterator

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import Node, open_node
from kvtide.bus.messages import NodeState
from kvtide.catalog import Catalog, Change, Writer, catalog_url
from kvtide.kv import Role
from kvtide.runtime import Clock, TaskScope
from kvtide.runtime.health import HealthServer, Readiness
from kvtide.store.deletion_watch import DeletionBook, DeletionWatch
from kvtide.store.drained_mark import DrainedMark
from kvtide.store.key_encryption import load_kek
from kvtide.store.rows import CatalogRows
from kvtide.store.settings import StoreSettings
from kvtide.store.shell import StoreService
from kvtide.store.ssd.events import Tombstone
from kvtide.store.ssd.life import ssd_dir
from kvtide.store.tenant_keys import CatalogKeys, check_catalog, check_start
from kvtide.store.tombstones import Tombstones

OPENING_S = 60.0
"""So long is waited for an SSD to be opened, before deletions are looked for without."""
OPENING_LOOK_S = 0.05

log = structlog.get_logger("kvtide.store")


async def serve(
    settings: StoreSettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry,
    clock: Clock,
) -> None:
    """Run a store until ``stop`` is set.

    The catalog may be down, slow or locked: serving does not notice.

    Raises:
        ConfigError: a setting can't be used.
    """
    url = catalog_url(settings.catalog, settings.state_dir)
    kek = load_kek(settings)
    if settings.ssd_bytes:
        check_start(ssd_dir(settings), kek)
    if kek is not None:
        await check_catalog(url, kek)
    roles = (Role.STORE,)
    async with (
        Catalog.open(url) as catalog,
        open_node(settings, roles, clock=clock, registry=registry, stop=stop) as node,
    ):

        def readiness() -> Readiness:
            detail = {"ssd": service.ssd_trouble} if service.ssd_trouble else {}
            if service.stays_out:
                # it is as it should be: whoever waits for it need not
                return Readiness(True, "drained", detail)
            return Readiness(node.state is NodeState.READY, node.state, detail)

        health = HealthServer(
            registry=registry,
            readiness=readiness,
            host=settings.listen,
            port=settings.http_port,
        )

        def repair() -> Iterator[Change]:
            return service.repair_rows()

        watch = TaskScope(on_error=_watch_failed)
        writer = Writer(catalog, clock=clock, on_repair=repair)
        rows = CatalogRows(writer.put, clock)
        kept = settings.state_dir / f"deletions-{node.ref.node}.json"
        deletions = Tombstones(kept, url, node.secret)
        service = StoreService(
            node,
            settings,
            registry,
            rows,
            leave=stop.set,
            deleted_spaces=deletions,
            drained=DrainedMark(settings.state_dir / f"drained-{node.ref.node}"),
            ssd_keys=None if kek is None else CatalogKeys(url, kek, clock),
        )
        writer.register(registry, Role.STORE)
        with health:
            node.set_http(health.url)
            writer.start()
            try:
                await service.start()
                watch.spawn(_watch(node, service, deletions, settings), name="watch")
                await stop.wait()
            finally:
                await watch.close(timeout_s=settings.drain_timeout_s)
                await service.close()
                await writer.close(timeout_s=settings.drain_timeout_s)


async def _watch(
    node: Node, service: StoreService, deletions: Tombstones, settings: StoreSettings
) -> None:
    """Carry out what was deleted while nobody could tell this store."""

    def told(deleted: Tombstone) -> bool:
        machine = service.machine
        return machine is not None and machine.ssd.was_told(deleted)

    clock = node.clock
    start_s, until_s = clock.wall(), clock.monotonic() + OPENING_S
    while settings.ssd_bytes and deletions.first is None:
        # whoever opens the SSD asks first; it may have no directory yet
        if clock.monotonic() > until_s:
            break
        await clock.sleep(OPENING_LOOK_S)
    watch = DeletionWatch(
        deletions.since,
        service.remove,
        clock,
        book=DeletionBook.at(start_s, deletions.first),
        every_s=settings.deletions_check_s,
    )
    await watch.run(told, lambda: node.bus.connected)


def _watch_failed(error: BaseException) -> None:
    log.error("deletion_watch_failed", exc_info=error)
