"""Limits on HTTP connections: how many there are, and how slow one may be."""

import asyncio
from http import HTTPStatus
from typing import ClassVar, cast

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtide.gateway.api.problems import ApiError, of_gateway
from kvtide.gateway.connection_limits import ConnectionLimits
from kvtide.gateway.errors import UnavailableError

RETRY_AFTER_MS = 1000.0

log = structlog.get_logger("kvtide.gateway.connections")


class _LimitedProtocol(H11Protocol):
    """Uvicorn's protocol within ``limits``, which a subclass sets."""

    limits: ClassVar[ConnectionLimits]
    _look_again: asyncio.TimerHandle | None = None
    _head_due: asyncio.TimerHandle | None = None
    _stuck_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            log.warning("too many connections", limit=self.limits.connections)
            transport.write(_refusal(self.limits.connections))
            transport.close()
        self._look_later()
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._look_again, self._head_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def send_400_response(self, msg: str) -> None:
        self._answer(ApiError(400, msg, code="invalid_http"))

    def _time_head(self) -> None:
        """The time runs while a head has begun, or the first one has not."""
        begun = self.conn.trailing_data[0] or cast("object", self.cycle) is None
        waits = self.conn.their_state is h11.IDLE and begun
        if not waits and self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
        elif waits and self._head_due is None:
            loop = asyncio.get_running_loop()
            self._head_due = loop.call_later(self.limits.head_s, self._head_late)

    def _head_late(self) -> None:
        if self.transport.is_closing():
            return
        log.info("request head too slow", client=self.client)
        if self.conn.trailing_data[0]:
            message = (
                f"the request's head did not arrive within {self.limits.head_s:g} s"
            )
            self._answer(ApiError(408, message, code="head_timeout"))
        else:
            self.transport.close()

    def _answer(self, error: ApiError) -> None:
        self.transport.write(_raw(error))
        self.transport.close()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._look_again = loop.call_later(self.limits.stall_s, self._look)

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


def limited_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """Uvicorn's protocol with these limits, as a class that uvicorn makes objects of."""
    return type("OwnLimits", (_LimitedProtocol,), {"limits": limits})


def _refusal(limit: int) -> bytes:
    return _raw(
        of_gateway(
            UnavailableError(
                f"{limit} connections are open, which is the limit",
                retry_after_ms=RETRY_AFTER_MS,
            )
        )
    )


def _raw(error: ApiError) -> bytes:
    """An error as the last bytes of a connection."""
    body = error.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
