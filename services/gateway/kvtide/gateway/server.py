"""The HTTP server in this loop: uvicorn without its own signals and logging."""

import contextlib
import os
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from kvtide.gateway.access.tls import TlsFiles
from kvtide.gateway.connection_limits import ConnectionLimits
from kvtide.gateway.connections import limited_protocol
from kvtide.runtime import ConfigError

KEEP_ALIVE_S = 75
STOP_S = 5
MAX_HEAD_BYTES = 64 * 1024


class HttpServer:
    """Listens from ``__init__`` on, serves while ``run`` runs, ends after ``stop``."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: ConnectionLimits,
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        """Bind the port. With ``tls`` nothing but HTTPS is served.

        Raises:
            ConfigError: the address can't be bound; the message names the port.
        """
        self._socket = _bind(host, port)
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ssl_certfile=tls.cert if tls is not None else None,
            ssl_keyfile=tls.key if tls is not None else None,
        )
        self._scheme = "http" if tls is None else "https"
        self._server = _Server(config)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are bound."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        """Where clients on this machine find it."""
        host, port = self.address
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        return f"{self._scheme}://{shown}:{port}"

    async def run(self) -> None:
        """Serve until ``stop``; open responses get ``STOP_S`` to end."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Take no more connections and end ``run``."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the process, which tells us by an event."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {os.strerror(error.errno or 0)}; "
            "choose another http_port",
            key="http_port",
        ) from error
