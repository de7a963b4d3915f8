"""Builds a real node out of a role's settings."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus.beater import NodeTimes
from kvtide.bus.errors import Interrupted
from kvtide.bus.identity import Identity
from kvtide.bus.limits import BusLimits
from kvtide.bus.metrics import BusMetrics
from kvtide.bus.nats_bus import NatsBus
from kvtide.bus.nats_client import NatsPass
from kvtide.bus.node import Node
from kvtide.bus.secret import load_secret
from kvtide.kv import NodeId, Role
from kvtide.runtime import Clock, ConfigError, TaskScope
from kvtide.runtime.settings import RoleSettings
from kvtide.runtime.tracer_opening import open_tracer
from kvtide.runtime.tracing import Tracer
from kvtide.transfer import (
    Endpoint,
    PrometheusObserver,
    Refused,
    TlsFiles,
    Unreachable,
    engine_named,
)

log = structlog.get_logger("kvtide.bus")


@asynccontextmanager
async def open_node(
    settings: RoleSettings,
    roles: Sequence[Role],
    *,
    clock: Clock,
    registry: CollectorRegistry,
    stop: asyncio.Event | None = None,
    limits: BusLimits | None = None,
    times: NodeTimes | None = None,
    host: str = "",
) -> AsyncGenerator[Node]:
    """A node that others see: secret, identity, transfer endpoint, NATS, beats.

    Waits for the NATS server for as long as it takes, or until ``stop`` is set.
    ``settings.node`` must be set. ``host`` is what it shares memory as; empty: as the
    folder of shared memory says.

    Raises:
        Interrupted: ``stop`` was set before the server was reached.
        ConfigError: the secret, the node's name or the transfer port can't be used, or
            traces are wanted without OpenTelemetry.
        EpochError: the state folder can't be written.
    """
    if not settings.node:
        raise ConfigError("this node has no name", key="node")
    node = NodeId(settings.node)
    state_dir = settings.state_dir.expanduser()
    secret = load_secret(settings.secret_file or state_dir / "secret")
    identity = Identity.open(node, state_dir, clock)
    async with AsyncExitStack() as stack:
        service = f"kvtide-{'-'.join(roles)}"
        tracer = await stack.enter_async_context(open_tracer(settings, service))
        observer = PrometheusObserver(registry)
        endpoint = await _started_endpoint(
            settings, identity, secret, clock, observer, tracer
        )
        stack.push_async_callback(endpoint.close)
        opening = NatsBus.open(
            settings.nats,
            identity,
            cluster=settings.cluster,
            clock=clock,
            entry=NatsPass.of(settings),
            endpoint=endpoint,
            limits=limits,
            metrics=BusMetrics(registry),
            tracer=tracer,
        )
        bus = await _unless(stop or asyncio.Event(), opening)
        await stack.enter_async_context(bus)
        opened = Node(
            roles=tuple(roles),
            bus=bus,
            identity=identity,
            clock=clock,
            secret=secret,
            endpoint=endpoint,
            times=times,
            host=host or endpoint.address.shm_host,
            tracer=tracer,
        )
        await stack.enter_async_context(opened)
        log.info("node open", node=node, epoch=identity.current.epoch)
        yield opened


def transfer_tls(settings: RoleSettings) -> TlsFiles | None:
    """The files for TLS between transfer ports; None: bytes go as they are.

    Raises:
        ConfigError: some are set and some are not.
    """
    certificate, key = settings.transfer_cert_file, settings.transfer_key_file
    authority = settings.transfer_ca_file
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise ConfigError(
            "TLS for transfers needs transfer_cert_file, transfer_key_file and "
            "transfer_ca_file, all of them",
            key="transfer_cert_file",
        )
    return TlsFiles(certificate, key, authority)


async def _started_endpoint(
    settings: RoleSettings,
    identity: Identity,
    secret: bytes,
    clock: Clock,
    observer: PrometheusObserver,
    tracer: Tracer,
) -> Endpoint:
    tls = transfer_tls(settings)
    if tls is not None and settings.transfer_engine:
        raise ConfigError(
            f"{settings.transfer_engine} does not encrypt what it carries: use either "
            "transfer_engine or the certificates of transfer ports",
            key="transfer_engine",
        )
    endpoint = Endpoint(
        node=settings.node,
        epoch=identity.current.epoch,
        secret=secret,
        clock=clock,
        listen_host=settings.listen,
        port=settings.transfer_port,
        advertise_host=settings.advertise or None,
        shm_dir=settings.shm_dir,
        tls=tls,
        engine=engine_named(settings.transfer_engine),
        observer=observer,
        tracer=tracer,
    )
    try:
        await endpoint.start()
    except (Refused, Unreachable) as error:
        raise ConfigError(
            f"bulk bytes can't go by {settings.transfer_engine}: {error}",
            key="transfer_engine",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the transfer port {settings.listen}:{settings.transfer_port} can't be "
            f"opened: {error.strerror or error}",
            key="transfer_port",
        ) from error
    return endpoint


async def _unless(
    stop: asyncio.Event, opening: Coroutine[None, None, NatsBus]
) -> NatsBus:
    """The open bus, if it opens before ``stop`` is set.

    Raises:
        Interrupted: it did not.
    """
    # what it raises is raised here, below
    async with TaskScope(on_error=lambda _: None) as scope:
        bus = scope.spawn(opening, name="opening")
        stopped = scope.spawn(stop.wait(), name="stopped")
        await asyncio.wait((bus, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not bus.done():
            raise Interrupted("asked to stop while waiting for NATS")
        return await bus
