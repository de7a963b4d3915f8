# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""The typed façade around nats-py: one connection, for one life of it.

nats-py's own reconnecting is not used: it would replay what was written before the
connection broke, and it gives up for ever at some of the server's errors. A connection
that is lost is closed; ``NatsLink`` makes a new one.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, urlsplit

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, SlowConsumerError

from kvtide.bus.delivery import Deliver, Delivery
from kvtide.bus.errors import Disconnected
from kvtide.bus.limits import BusLimits
from kvtide.runtime import ConfigError
from kvtide.runtime.settings import RoleSettings

_NO_RESPONDERS = "503"
_RETRY_S = 0.05
_SCHEMES = ("nats", "tls", "ws", "wss")
_PENDING_COUNT = 65_536
_REFUSED = "permissions violation"

log = structlog.get_logger("kvtide.bus.nats")


def shown_url(url: str) -> str:
    """The URL without user and password, for logs.

    Raises:
        ValueError: it is no URL.
    """
    parts = _split(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


def check_url(url: str) -> None:
    """Refuse what can't be an address of a NATS server.

    Raises:
        ConfigError: it is none.
    """
    try:
        shown = shown_url(url)
        parts = _split(url)
    except ValueError as error:
        raise ConfigError(f"a NATS URL can't be read: {error}", key="nats") from error
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ConfigError(
            f"{shown!r} is no URL of a NATS server: write nats://HOST:PORT", key="nats"
        )


def _whole(seconds: float) -> int:
    """Seconds as nats-py types them: whole, and never zero."""
    return max(1, round(seconds))


def _split(url: str) -> SplitResult:
    return urlsplit(url if "://" in url else f"nats://{url}")


@dataclass(frozen=True, slots=True)
class NatsPass:
    """How a server lets us in, and how we know it. Without either: by its URL alone.

    ``key_file`` holds the seed of this node's nkey, which never leaves this process: it
    signs what the server asks. ``ca_file`` holds the authority that signed the server's
    certificate; with it nothing is sent in the clear.
    """

    key_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def of(cls, settings: RoleSettings) -> Self:
        """As the settings of a role name the files."""
        return cls(settings.nats_key_file, settings.nats_ca_file)

    def check(self) -> None:
        """Refuse files that can't be read, before anybody waits for a server.

        Raises:
            ConfigError: one can't.
        """
        files = {"nats_key_file": self.key_file, "nats_ca_file": self.ca_file}
        for key, path in files.items():
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"{path} can't be read: {error.strerror}", key=key
                ) from error
        if self.ca_file is not None:
            try:
                self.context()
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{self.ca_file} holds no certificate", key="nats_ca_file"
                ) from error

    def context(self) -> ssl.SSLContext | None:
        """What TLS is set up with; None: no TLS.

        Raises:
            OSError: the file can't be read or holds no certificate.
        """
        if self.ca_file is None:
            return None
        context = ssl.create_default_context(cafile=str(self.ca_file))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


OPEN = NatsPass()


@dataclass(frozen=True, slots=True)
class Interest:
    """A subscription of one connection."""

    subscription: Subscription

    async def end(self) -> None:
        """Hear no more; harmless when the connection is gone."""
        with contextlib.suppress(Error, OSError):
            await self.subscription.unsubscribe()


class NatsConnection:
    """One connection. Made by ``dial``; once lost it never comes back."""

    def __init__(
        self, url: str, name: str, limits: BusLimits, entry: NatsPass = OPEN
    ) -> None:
        """Not connected yet."""
        self._pass = entry
        self._url = url
        self._name = name
        self._limits = limits
        self._client = Client()
        self._lost = asyncio.Event()
        self._dropped: dict[int, Callable[[int], None]] = {}
        self.last_error = ""

    @classmethod
    async def dial(
        cls, url: str, name: str, limits: BusLimits, entry: NatsPass = OPEN
    ) -> "NatsConnection":
        """Connect to the server at ``url``.

        Raises:
            Disconnected: nobody answers there, or it does not let us in.
        """
        connection = cls(url, name, limits, entry)
        try:
            async with asyncio.timeout(limits.connect_timeout_s):
                await connection._connect()
        except (Error, OSError, TimeoutError, ValueError) as error:
            await connection.close()
            why = connection.last_error or str(error) or type(error).__name__
            raise Disconnected(f"NATS at {shown_url(url)}: {why}") from error
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def connected(self) -> bool:
        """Whether it still is."""
        return self._client.is_connected and not self._lost.is_set()

    @property
    def max_payload_bytes(self) -> int:
        """What the server said."""
        return self._client.max_payload

    async def publish(self, subject: str, data: bytes, reply: str) -> None:
        """Send.

        Raises:
            Disconnected: it is lost, or the socket takes nothing.
        """
        if self._client.pending_data_size > self._limits.unsent_bytes:
            raise Disconnected("the NATS server does not take what is sent")
        try:
            await self._client.publish(subject, data, reply=reply)
        except (Error, OSError) as error:
            if not self._client.is_connected:
                self._lost.set()
            raise Disconnected(f"not sent: {error or type(error).__name__}") from error

    async def subscribe(
        self, subject: str, deliver: Deliver, on_dropped: Callable[[int], None]
    ) -> Interest:
        """Hear of ``subject``; when this returns the server knows.

        Raises:
            Disconnected: it is lost.
        """

        async def heard(message: Msg) -> None:
            headers = message.headers or {}
            nobody = not message.data and headers.get("Status") == _NO_RESPONDERS
            deliver(
                Delivery(message.subject, message.data, message.reply or "", nobody)
            )

        try:
            subscription = await self._client.subscribe(
                subject,
                cb=heard,
                pending_msgs_limit=_PENDING_COUNT,
                pending_bytes_limit=self._limits.waiting_bytes,
            )
            self._dropped[id(subscription)] = on_dropped
            timeout_s = _whole(self._limits.connect_timeout_s)
            # nats-py's ping overtakes what its flusher has yet to write: the first
            # round trip lets the flusher run, the second one is behind the SUB
            await self._client.flush(timeout=timeout_s)
            await self._client.flush(timeout=timeout_s)
        except (Error, OSError) as error:
            raise Disconnected(f"not subscribed: {error}") from error
        return Interest(subscription)

    def release(self, interest: Interest) -> None:
        """Forget whom to tell of that interest's drops."""
        self._dropped.pop(id(interest.subscription), None)

    async def wait_lost(self, check_s: float) -> None:
        """Return when the connection is gone, whether nats-py says so or not."""
        while self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(check_s):
                    await self._lost.wait()

    async def drain(self) -> None:
        """Send what is on its way, then close."""
        if self.connected:
            with contextlib.suppress(Error, OSError, TimeoutError):
                async with asyncio.timeout(self._limits.drain_timeout_s):
                    await self._client.drain()
        await self.close()

    async def close(self) -> None:
        """Close at once. Idempotent."""
        # nats-py may trip over a half-open transport, or wait for the end of one that
        # never got TLS; nothing is left to save then
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._limits.drain_timeout_s):
                await self._client.close()

    async def _connect(self) -> None:
        limits, key = self._limits, self._pass.key_file
        await self._client.connect(
            nkeys_seed=None if key is None else str(key),
            tls=self._pass.context(),
            servers=[self._url],
            name=self._name,
            error_cb=self._errored,
            closed_cb=self._closed,
            disconnected_cb=self._closed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=_RETRY_S,  # pyright: ignore[reportArgumentType]
            connect_timeout=_whole(limits.connect_timeout_s),
            ping_interval=limits.ping_s,  # pyright: ignore[reportArgumentType]
            drain_timeout=_whole(limits.drain_timeout_s),
            # no buffer: what can't be sent now is not sent
            pending_size=0,
        )

    async def _closed(self) -> None:
        self._lost.set()

    async def _errored(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            tell = self._dropped.get(id(error.sub))
            if tell is not None:
                tell(1)
            return
        self.last_error = str(error) or type(error).__name__
        if _REFUSED in self.last_error.lower():
            # whoever waits for what was refused will only see that nothing comes
            log.error("NATS refuses", error=self.last_error, node=self._name)
