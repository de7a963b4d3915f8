"""An endpoint behind a proxy that breaks the bytes between."""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Endpoint,
    EndpointAddress,
    Operation,
)

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20
CLOCK = SystemClock()


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.retries: list[str] = []
        self.failures: list[str] = []

    def transferred(
        self, path: str, purpose: str, operation: Operation, nbytes: int, seconds: float
    ) -> None: ...

    def failed(self, path: str, purpose: str, operation: Operation, kind: str) -> None:
        self.failures.append(kind)

    def retried(self, path: str, purpose: str, reason: str) -> None:
        self.retries.append(reason)

    def served(
        self, path: str, purpose: str, operation: Operation, nbytes: int
    ) -> None: ...

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)


def make(node: str, notes: Notes | None = None) -> Endpoint:
    return Endpoint(
        node=node, epoch=1, secret=SECRET, clock=CLOCK, shm_dir=None, observer=notes
    )


def throw(port: int, data: bytes) -> bytes:
    """Send bytes to the port; what came back until it hung up."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        back = b""
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while got := sock.recv(65536):
                back += got
        except OSError:
            # it hung up before we were done
            return back
        return back


class Proxy:
    """Passes bytes between a reader and the owner, changed by ``change``.

    ``change(chunk, total)`` gives what goes to the reader instead of ``chunk``, after
    ``total`` bytes have gone; b"" cuts the connection.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.change: Callable[[bytes, int], bytes] = lambda chunk, _: chunk
        self.up: Callable[[bytes, int], bytes] = lambda chunk, _: chunk
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for source, sink, down in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pass, args=(source, sink, down))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        total = 0
        try:
            while chunk := source.recv(65536):
                changed = (self.change if down else self.up)(chunk, total)
                total += len(chunk)
                if not changed:
                    break
                sink.sendall(changed)
        except OSError:
            pass
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


def through(proxy: Proxy, owner: Endpoint) -> EndpointAddress:
    return replace(owner.address, port=proxy.port)


class Breaker:
    """Changes the first ``times`` chunks that lie past ``after`` bytes."""

    def __init__(self, kind: str, times: int, after: int = 400) -> None:
        self.kind = kind
        self.left = times
        self.after = after
        self._lock = threading.Lock()

    def __call__(self, chunk: bytes, total: int) -> bytes:
        with self._lock:
            if total < self.after or len(chunk) < 1000 or self.left == 0:
                return chunk
            self.left -= 1
        half = len(chunk) // 2
        match self.kind:
            case "flip":
                return chunk[:half] + bytes([chunk[half] ^ 4]) + chunk[half + 1 :]
            case "swap":
                return chunk[half : 2 * half] + chunk[:half] + chunk[2 * half :]
            case "shorten":
                return chunk[:half] + chunk[half + 8 :]
            case _:
                return b""
