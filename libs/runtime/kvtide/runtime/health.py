"""/livez, /readyz, /metrics and more of a role that has no HTTP door of its own.

Runs in threads of its own, so that it answers while the event loop is busy or hung.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry

from kvtide.runtime.clock import Clock, SystemClock
from kvtide.runtime.errors import ConfigError
from kvtide.runtime.metrics import exposition

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the role takes work, and why not: body of ``/readyz``."""

    ready: bool
    state: str
    detail: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> bytes:
        """The JSON object that ``/readyz`` answers with."""
        shown = {"ready": self.ready, "state": self.state, **self.detail}
        return json.dumps(shown).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content_type: str
    body: bytes


class HealthServer:
    """A bounded HTTP/1.0 server for health and metrics.

    At most ``MAX_CONNECTIONS`` at a time, ``MAX_REQUEST_BYTES`` and
    ``REQUEST_TIMEOUT_S`` for a whole request; more connections are told 503. Callables
    are called in this server's threads: they must be thread-safe and quick. One that
    raises is a 500 of that request only. ``pages`` are paths and what is answered there,
    which must be such as JSON can say; None is a 503. ``close`` frees the port.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        readiness: Callable[[], Readiness],
        alive: Callable[[], bool] | None = None,
        pages: Mapping[str, Callable[[], object]] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """Nothing listens before ``start``."""
        self._registry = registry
        self._readiness = readiness
        self._alive = alive
        self._pages = dict(pages or {})
        self._host = host
        self._port = port
        self._clock = clock or SystemClock()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def port(self) -> int:
        """The port that is bound, after ``start``."""
        return self._port

    @property
    def url(self) -> str:
        """Where this answers, as the binding host names it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def start(self) -> int:
        """Bind and serve; returns the port.

        Raises:
            ConfigError: the address can't be bound; the message names the port.
        """
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server(
                (self._host, self._port), family=family, backlog=64
            )
        except OSError as error:
            message = (
                f"can't listen on {self._host}:{self._port} for health and metrics: "
                f"{error.strerror}; choose another http_port"
            )
            raise ConfigError(message, key="http_port") from error
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._thread = threading.Thread(
            target=self._accept, args=(listener,), name="health", daemon=True
        )
        self._thread.start()
        return self._port

    def close(self) -> None:
        """Stop listening; idempotent. Connections in progress end by their limit."""
        self._closing = True
        listener, self._listener = self._listener, None
        if listener is None:
            return
        # wakes the accepting thread, which close alone does not
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if self._thread is not None:
            self._thread.join(timeout=REQUEST_TIMEOUT_S)

    def __enter__(self) -> Self:
        """Start; see ``start``."""
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; see ``close``."""
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closing:
                    return
                # out of file descriptors, or a client that left: not for ever
                threading.Event().wait(0.05)
                continue
            if not self._free.acquire(blocking=False):
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(0.1)
                    connection.sendall(_encode(_text(503, "too many connections")))
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="health", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                head = self._read_head(connection)
                if head is not None:
                    connection.settimeout(REQUEST_TIMEOUT_S)
                    connection.sendall(_encode(self._answer(head)))
                    connection.shutdown(socket.SHUT_WR)
        finally:
            self._free.release()

    def _read_head(self, connection: socket.socket) -> bytes | None:
        """The request's head; None when the client leaves or takes too long."""
        deadline_s = self._clock.monotonic() + REQUEST_TIMEOUT_S
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left_s = deadline_s - self._clock.monotonic()
            if left_s <= 0 or len(head) > MAX_REQUEST_BYTES:
                break
            connection.settimeout(left_s)
            chunk = connection.recv(2048)
            if not chunk:
                return head or None
            head += chunk
        return head

    def _answer(self, head: bytes) -> _Answer:
        line = head.split(b"\n", 1)[0].strip().decode("latin-1")
        words = line.split(" ")
        if len(words) not in (2, 3) or not words[1].startswith("/"):
            return _text(400, "not an HTTP request")
        method, path = words[0], words[1].split("?", 1)[0]
        if method not in ("GET", "HEAD"):
            return _text(405, "only GET")
        try:
            answer = self._route(path)
        except Exception as error:  # noqa: BLE001 - a broken probe is a 500, not a dead thread
            answer = _text(500, f"{type(error).__name__}")
        if method == "HEAD":
            return _Answer(answer.status, answer.content_type, b"")
        return answer

    def _route(self, path: str) -> _Answer:
        if path == "/livez":
            if self._alive is None or self._alive():
                return _text(200, "ok")
            return _text(503, "not alive")
        if path == "/readyz":
            readiness = self._readiness()
            status = 200 if readiness.ready else 503
            return _Answer(status, "application/json", readiness.body())
        if path == "/metrics":
            content_type, body = exposition(self._registry)
            return _Answer(200, content_type, body)
        if path in self._pages:
            return _page(self._pages[path]())
        more = "".join(f"{each}, " for each in self._pages)
        return _text(404, f"try {more}/livez, /readyz or /metrics")


def _page(content: object) -> _Answer:
    if content is None:
        return _text(503, "not known now")
    return _Answer(200, "application/json", json.dumps(content).encode() + b"\n")


def _text(status: int, text: str) -> _Answer:
    return _Answer(status, "text/plain; charset=utf-8", text.encode() + b"\n")


def _encode(answer: _Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + answer.body
