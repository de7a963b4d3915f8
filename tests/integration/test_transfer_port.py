"""Strangers on the transfer port, and a wire that breaks bytes."""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    Cancelled,
    Corrupt,
    Endpoint,
    EndpointAddress,
    Operation,
    ReadSlice,
    Refused,
    TimedOut,
    TransferError,
    Unreachable,
    WriteSlice,
)
from kvtide.transfer.handles import PROTOCOL
from kvtide.transfer.wire import MAGIC

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


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
async def owner(notes: Notes) -> AsyncIterator[Endpoint]:
    async with make("owner", notes) as endpoint:
        yield endpoint


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


async def still_works(owner: Endpoint) -> None:
    async with make("reader") as reader:
        region = owner.register(b"some constant bytes", name="constant")
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(4))
        await peer.read([ReadSlice(region.handle(), 5, into)], timeout_s=10)
        assert bytes(into) == b"cons"
        await owner.deregister(region)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "an HTTP request"),
        (bytes.fromhex("16030102000100fc0303") + bytes(200), "a TLS hello"),
        (pickle.dumps({"a": [1, 2, 3]}, protocol=4), "a pickle"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "an SSH client"),
        (b"\x00" * 5000, "unknown bytes"),
    ],
)
async def test_strangers(owner: Endpoint, notes: Notes, data: bytes, said: str) -> None:
    assert await asyncio.to_thread(throw, owner.address.port, data) == b""
    assert any(said in reason for reason in notes.refusals), notes.refusals
    await still_works(owner)


async def test_another_protocol_version(owner: Endpoint, notes: Notes) -> None:
    hello = MAGIC + bytes([PROTOCOL + 1]) + bytes(60)
    back = await asyncio.to_thread(throw, owner.address.port, hello)
    assert back == MAGIC + bytes([PROTOCOL])
    assert any("protocol" in reason for reason in notes.refusals)


async def test_hello_that_stops(owner: Endpoint) -> None:
    for length in (0, 1, 4, 5, 30):
        hello = (MAGIC + bytes([PROTOCOL]) + bytes(60))[:length]
        assert await asyncio.to_thread(throw, owner.address.port, hello) == b""
    await still_works(owner)


def test_random_bytes() -> None:
    async def run(examples: Callable[[int], None]) -> None:
        async with make("owner") as owner:
            await asyncio.to_thread(examples, owner.address.port)
            await still_works(owner)

    def examples(port: int) -> None:
        @given(
            st.one_of(
                st.binary(max_size=300),
                st.binary(max_size=300).map((MAGIC + bytes([PROTOCOL])).__add__),
            )
        )
        @settings(
            max_examples=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        def throws(data: bytes) -> None:
            throw(port, data)

        throws()

    logging.disable(logging.WARNING)
    try:
        asyncio.run(run(examples))
    finally:
        logging.disable(logging.NOTSET)


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


@pytest.fixture
def proxy(owner: Endpoint) -> Iterator[Proxy]:
    proxy = Proxy(owner.address.port)
    yield proxy
    proxy.close()


@pytest.fixture
async def reader(notes: Notes) -> AsyncIterator[Endpoint]:
    async with make("reader", notes) as endpoint:
        yield endpoint


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


@pytest.mark.parametrize("kind", ["flip", "swap", "shorten", "cut"])
@pytest.mark.parametrize("operation", ["read", "write"])
async def test_broken_bytes_are_retried(
    owner: Endpoint,
    reader: Endpoint,
    proxy: Proxy,
    notes: Notes,
    kind: str,
    operation: str,
) -> None:
    data = os.urandom(4 * MIB)
    region = owner.register(bytearray(data), name="arena")
    handle = region.handle(Access.WRITE)
    peer = await reader.connect(through(proxy, owner))
    into = bytearray(4 * MIB)
    view = memoryview(into)
    breaker = Breaker(kind, times=2)
    if operation == "read":
        proxy.change = breaker
        parts = [ReadSlice(handle, at, view[at : at + MIB]) for at in parts_of(data)]
        await peer.read(parts, timeout_s=20)
        assert into == data
    else:
        proxy.up = breaker
        news = memoryview(os.urandom(4 * MIB))
        sources = [WriteSlice(handle, at, news[at : at + MIB]) for at in parts_of(data)]
        await peer.write(sources, timeout_s=20)
        assert region.view == news
    assert breaker.left == 0
    assert 1 <= len(notes.retries) <= 3
    assert notes.failures == []


def parts_of(data: bytes) -> range:
    return range(0, len(data), MIB)


@pytest.mark.parametrize(("kind", "error"), [("flip", Corrupt), ("cut", Unreachable)])
async def test_the_budget_of_retries_ends(
    owner: Endpoint,
    reader: Endpoint,
    proxy: Proxy,
    notes: Notes,
    kind: str,
    error: type[TransferError],
) -> None:
    region = owner.register(os.urandom(MIB), name="arena")
    peer = await reader.connect(through(proxy, owner))
    proxy.change = Breaker(kind, times=10**9)
    into = memoryview(bytearray(MIB))
    with pytest.raises(error) as caught:
        await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=30)
    assert caught.value.node == "owner"
    assert len(notes.retries) == 3
    assert notes.failures == [error.kind]


async def test_silence_ends_at_the_deadline(
    owner: Endpoint, reader: Endpoint, proxy: Proxy
) -> None:
    region = owner.register(os.urandom(MIB), name="arena")
    peer = await reader.connect(through(proxy, owner))
    into = memoryview(bytearray(MIB))
    await peer.read([ReadSlice(region.handle(), 0, into[:10])], timeout_s=30)
    silence = threading.Event()

    def hold(chunk: bytes, total: int) -> bytes:
        silence.wait(30)
        return chunk

    proxy.change = hold
    try:
        with pytest.raises(TimedOut):
            await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=0.2)
        transfer = peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=0.2)
        with pytest.raises(TimedOut):
            await asyncio.to_thread(transfer.wait_blocking)
        transfer = peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=20)
        with pytest.raises(TimedOut):
            await asyncio.to_thread(transfer.wait_blocking, 0.1)
        assert not transfer.done()
        transfer.cancel()
        with pytest.raises(Cancelled):
            await transfer
    finally:
        proxy.change = lambda chunk, _: chunk
        silence.set()
    await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=30)
    assert into == region.view


async def test_the_trace_goes_with_the_request(
    owner: Endpoint, reader: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    region = owner.register(b"bytes", name="arena")
    peer = await reader.connect(owner.address)
    into = memoryview(bytearray(5))
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with caplog.at_level(logging.DEBUG, "kvtide.transfer"):
        slices = [ReadSlice(region.handle(), 0, into)]
        await peer.read(slices, timeout_s=10, trace=trace)
        # the owner logs after its answer, in its own thread
        async with asyncio.timeout(10):
            while trace not in [vars(r).get("trace") for r in caplog.records]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_nothing_listens(reader: Endpoint) -> None:
    async with make("other") as other:
        address = other.address
    with pytest.raises(Unreachable):
        await reader.connect(address)


async def test_a_silent_port_is_given_up(reader: Endpoint, owner: Endpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = replace(owner.address, port=silent.getsockname()[1])
        with pytest.raises(TimedOut):
            await reader.connect(address, timeout_s=0.3)


async def test_another_server(reader: Endpoint, owner: Endpoint) -> None:
    """What answers is no endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"220 mail.example ESMTP\r\n" * 10)
                sock.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        address = replace(owner.address, port=other.getsockname()[1])
        with pytest.raises(Refused):
            await reader.connect(address, timeout_s=5)
        await asyncio.to_thread(thread.join)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"kvtide-*-{os.getpid()}-*"))  # noqa: S108


async def test_nothing_is_left() -> None:
    """Threads and descriptors return to what they were, failures included."""

    async def rounds(count: int) -> None:
        async with make("owner") as owner, make("reader") as reader:
            region = owner.allocate(MIB, name="arena")
            peer = await reader.connect(owner.address)
            into = memoryview(bytearray(MIB))
            for index in range(count):
                transfer = peer.read(
                    [ReadSlice(region.handle(), 0, into)], timeout_s=20
                )
                if index % 3 == 0:
                    transfer.cancel()
                try:
                    await transfer
                except Cancelled:
                    continue

    await rounds(2)
    files = descriptors()
    await rounds(30)
    assert [t.name for t in threading.enumerate() if "transfer" in t.name] == []
    assert descriptors() == files
    assert shared_files() == []
