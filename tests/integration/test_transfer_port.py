"""Strangers on the transfer port, and ports that are no endpoints."""

import asyncio
import gc
import logging
import os
import pickle
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.integration.transfer_proxy import (
    CLOCK,
    MIB,
    SECRET,
    Notes,
    make,
    throw,
)

from kvtide.transfer import (
    Cancelled,
    Endpoint,
    ReadSlice,
    Refused,
    TimedOut,
    Unreachable,
)
from kvtide.transfer.handles import PROTOCOL
from kvtide.transfer.wire import MAGIC


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
async def owner(notes: Notes) -> AsyncIterator[Endpoint]:
    async with make("owner", notes) as endpoint:
        yield endpoint


@pytest.fixture
async def reader(notes: Notes) -> AsyncIterator[Endpoint]:
    async with make("reader", notes) as endpoint:
        yield endpoint


async def is_said(notes: Notes, words: str) -> None:
    """The owner says why after it has hung up, in its own thread."""
    async with asyncio.timeout(40):
        while not any(words in reason for reason in notes.refusals):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


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
    await is_said(notes, said)
    await still_works(owner)


async def test_another_protocol_version(owner: Endpoint, notes: Notes) -> None:
    hello = MAGIC + bytes([PROTOCOL + 1]) + bytes(60)
    back = await asyncio.to_thread(throw, owner.address.port, hello)
    assert back == MAGIC + bytes([PROTOCOL])
    await is_said(notes, "protocol")


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
    gc.collect()  # what other tests have left to be collected
    files = descriptors()
    await rounds(30)
    assert [t.name for t in threading.enumerate() if "transfer" in t.name] == []
    assert descriptors() <= files
    assert shared_files() == []


async def test_an_owner_with_too_many_connections() -> None:
    async with (
        Endpoint(
            node="owner",
            epoch=1,
            secret=SECRET,
            clock=CLOCK,
            shm_dir=None,
            most_connections=2,
        ) as owner,
        make("first") as first,
        make("second") as second,
    ):
        region = owner.register(b"bytes", name="arena")
        slices = [ReadSlice(region.handle(), 0, memoryview(bytearray(5)))]
        peer = await first.connect(owner.address)
        # the peer's one data connection fits, another peer does not
        await peer.read(slices, timeout_s=10)
        with pytest.raises(Refused, match="too many"):
            await second.connect(owner.address)
        await first.close()
        async with asyncio.timeout(40):
            while True:
                try:
                    other = await second.connect(owner.address)
                except Refused:
                    await asyncio.sleep(0.01)
                else:
                    break
        await other.read(slices, timeout_s=10)
