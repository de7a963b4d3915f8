"""A bus on a real NATS server."""

from kvtide.bus.beater import ThreadBeater
from kvtide.bus.core import LinkedBus
from kvtide.bus.identity import Identity
from kvtide.bus.limits import BusLimits
from kvtide.bus.metrics import BusMetrics
from kvtide.bus.nats_client import OPEN, NatsPass
from kvtide.bus.nats_link import NatsLink
from kvtide.bus.subjects import Subjects
from kvtide.runtime import Clock, SystemClock
from kvtide.runtime.tracing import NO_TRACES, Tracer
from kvtide.transfer import TransferEndpoint


class NatsBus(LinkedBus):
    """See ``Bus``. Made by ``open``."""

    def __init__(
        self,
        link: NatsLink,
        subjects: Subjects,
        identity: Identity,
        clock: Clock,
        *,
        urls: str,
        entry: NatsPass,
        endpoint: TransferEndpoint | None,
        limits: BusLimits,
        metrics: BusMetrics | None,
        tracer: Tracer,
    ) -> None:
        """Made by ``open``."""
        super().__init__(
            link,
            subjects,
            identity,
            clock,
            endpoint=endpoint,
            limits=limits,
            metrics=metrics,
            tracer=tracer,
        )
        self._urls = urls
        self._pass = entry

    @classmethod
    async def open(
        cls,
        urls: str,
        identity: Identity,
        *,
        cluster: str = "local",
        clock: Clock | None = None,
        entry: NatsPass = OPEN,
        endpoint: TransferEndpoint | None = None,
        limits: BusLimits | None = None,
        metrics: BusMetrics | None = None,
        tracer: Tracer = NO_TRACES,
    ) -> "NatsBus":
        """Connect, waiting for the server for as long as it takes.

        Use the result as an async context manager.

        Raises:
            ConfigError: there is no URL.
            ValueError: the cluster's name does not fit a subject.
        """
        subjects = Subjects(cluster)
        clock = clock or SystemClock()
        limits = limits or BusLimits()
        link = await NatsLink.open(
            urls, name=identity.current.node, limits=limits, clock=clock, entry=entry
        )
        return cls(
            link,
            subjects,
            identity,
            clock,
            urls=urls,
            entry=entry,
            endpoint=endpoint,
            limits=limits,
            metrics=metrics,
            tracer=tracer,
        )

    def beater(self) -> ThreadBeater:
        """See ``LinkedBus.beater``: a thread with its own loop and connection."""

        async def connect() -> NatsLink:
            return await NatsLink.open(
                self._urls,
                name=f"{self._identity.current.node}-beats",
                limits=self._limits,
                clock=self._clock,
                entry=self._pass,
            )

        return ThreadBeater(connect)
