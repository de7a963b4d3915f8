"""A link over NATS that comes back for ever, with all its interests."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvtide.bus.delivery import Deliver
from kvtide.bus.errors import BusClosed, Disconnected
from kvtide.bus.limits import BusLimits
from kvtide.bus.link import LinkEvents, Unlisten
from kvtide.bus.nats_client import (
    OPEN,
    Interest,
    NatsConnection,
    NatsPass,
    check_url,
    shown_url,
)
from kvtide.runtime import Clock, ConfigError, TaskScope

_LONGEST_WAIT_S = 2.0

log = structlog.get_logger("kvtide.bus.nats")


@dataclass(eq=False, slots=True)
class _Listen:
    """An interest that outlives connections."""

    subject: str
    deliver: Deliver
    on_dropped: Callable[[int], None]
    connection: NatsConnection | None = None
    interest: Interest | None = None


class NatsLink:
    """See ``Link``. Made by ``open``; for the loop that it was opened in."""

    def __init__(
        self,
        urls: tuple[str, ...],
        name: str,
        limits: BusLimits,
        clock: Clock,
        entry: NatsPass = OPEN,
    ) -> None:
        """Not connected; see ``open``."""
        self._pass = entry
        self._urls = urls
        self._name = name
        self._limits = limits
        self._clock = clock
        self._random = random.Random()  # noqa: S311 - jitter
        self._tasks = TaskScope()
        self._connection: NatsConnection | None = None
        self._events: LinkEvents | None = None
        self._listens: list[_Listen] = []
        self._closed = False

    @classmethod
    async def open(
        cls,
        urls: str,
        *,
        name: str,
        limits: BusLimits,
        clock: Clock,
        entry: NatsPass = OPEN,
    ) -> "NatsLink":
        """Connect, waiting for the server for as long as it takes.

        ``urls`` is one URL or several, separated by commas, tried in turn.

        Raises:
            ConfigError: there is no URL, or one, or a file of ``entry``, can't be read.
        """
        split = tuple(url.strip() for url in urls.split(",") if url.strip())
        if not split:
            raise ConfigError("no URL of a NATS server is set", key="nats")
        for url in split:
            check_url(url)
        entry.check()
        link = cls(split, name, limits, clock, entry)
        link._connection = await link._dial()
        return link

    @property
    def connected(self) -> bool:
        """See ``Link.connected``."""
        connection = self._connection
        return connection is not None and connection.connected and not self._closed

    @property
    def max_payload_bytes(self) -> int:
        """See ``Link.max_payload_bytes``."""
        connection = self._connection
        if connection is None:
            return self._limits.inline_bytes
        return connection.max_payload_bytes

    def start(self, events: LinkEvents) -> None:
        """See ``Link.start``."""
        self._events = events
        self._tasks.spawn(self._supervise(events), name="nats link")

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """See ``Link.send``."""
        if self._closed:
            raise BusClosed("the bus was closed")
        connection = self._connection
        if connection is None or not connection.connected:
            raise Disconnected("there is no connection to NATS now")
        await connection.publish(subject, data, reply)

    async def listen(
        self, subject: str, deliver: Deliver, on_dropped: Callable[[int], None]
    ) -> Unlisten:
        """See ``Link.listen``."""
        if self._closed:
            raise BusClosed("the bus was closed")
        listen = _Listen(subject, deliver, on_dropped)
        self._listens.append(listen)
        connection = self._connection
        if connection is not None and connection.connected:
            await self._install(listen, connection)

        async def unlisten() -> None:
            if listen in self._listens:
                self._listens.remove(listen)
            await self._remove(listen)

        return unlisten

    async def close(self) -> None:
        """See ``Link.close``."""
        if self._closed:
            return
        self._closed = True
        await self._tasks.close(timeout_s=2 * self._limits.connect_timeout_s)
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.drain()

    # ---- inside

    async def _supervise(self, events: LinkEvents) -> None:
        while True:
            connection = self._connection
            if connection is not None:
                await connection.wait_lost(self._limits.ping_s)
                self._connection = None
                log.warning("NATS connection lost", error=connection.last_error)
                events.disconnected()
                await connection.close()
            fresh = await self._dial()
            if await self._restore(fresh):
                self._connection = fresh
                events.reconnected()
            else:
                await fresh.close()

    async def _dial(self) -> NatsConnection:
        tries = 0
        while True:
            url = self._urls[tries % len(self._urls)]
            try:
                connection = await NatsConnection.dial(
                    url, self._name, self._limits, self._pass
                )
            except Disconnected as error:
                # one line when it begins, then about one for each minute
                if tries % 30 == 0:
                    log.warning("waiting for NATS", error=str(error), tries=tries + 1)
            else:
                log.info("NATS connected", url=shown_url(url), tries=tries + 1)
                return connection
            tries += 1
            wait_s = min(self._limits.reconnect_wait_s * tries, _LONGEST_WAIT_S)
            await self._clock.sleep(wait_s * self._random.uniform(0.5, 1.0))

    async def _restore(self, connection: NatsConnection) -> bool:
        """All interests on the new connection, also those that come meanwhile."""
        while connection.connected:
            missing = [x for x in self._listens if x.connection is not connection]
            if not missing:
                return True
            for listen in missing:
                await self._install(listen, connection)
        return False

    async def _install(self, listen: _Listen, connection: NatsConnection) -> None:
        listen.connection = connection
        try:
            interest = await connection.subscribe(
                listen.subject, listen.deliver, listen.on_dropped
            )
        except Disconnected:
            # the supervisor finds the connection lost and restores on the next one
            return
        if listen.connection is connection:
            listen.interest = interest
        if listen not in self._listens:
            await self._remove(listen)

    async def _remove(self, listen: _Listen) -> None:
        connection, interest = listen.connection, listen.interest
        listen.interest = None
        if connection is None or interest is None:
            return
        connection.release(interest)
        await interest.end()
