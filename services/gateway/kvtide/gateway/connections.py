"""Limits on HTTP connections: how many there are, and how long one may take nothing."""

import asyncio
from dataclasses import dataclass

import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtide.gateway.api.problems import of_gateway
from kvtide.gateway.errors import UnavailableError

RETRY_AFTER_MS = 1000.0

log = structlog.get_logger("kvtide.gateway.connections")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``connections`` at a time; more are answered with 503 and closed at once.

    One whose client takes not a byte of what waits for it, for ``stall_s`` to twice
    that, is cut: its request then ends like that of any client that left.
    """

    connections: int
    stall_s: float


def limited_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """Uvicorn's protocol with these limits, as a class that uvicorn makes objects of."""

    class LimitedProtocol(H11Protocol):
        _look_again: asyncio.TimerHandle | None = None
        _stuck_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                log.warning("too many connections", limit=limits.connections)
                transport.write(_refusal(limits.connections))
                transport.close()
            self._look_later()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._look_again is not None:
                self._look_again.cancel()
            super().connection_lost(exc)

        def _look_later(self) -> None:
            loop = asyncio.get_running_loop()
            self._look_again = loop.call_later(limits.stall_s, self._look)

        def _look(self) -> None:
            # in both states nothing more is written, so what waits can only shrink
            waits = self.flow.write_paused or self.transport.is_closing()
            left = self.transport.get_write_buffer_size() if waits else 0
            if left and left == self._stuck_bytes:
                log.info("client takes nothing", client=self.client, waiting_bytes=left)
                self.transport.abort()
                return
            self._stuck_bytes = left
            self._look_later()

    return LimitedProtocol


def _refusal(limit: int) -> bytes:
    error = of_gateway(
        UnavailableError(
            f"{limit} connections are open, which is the limit",
            retry_after_ms=RETRY_AFTER_MS,
        )
    )
    body = error.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} Service Unavailable"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
