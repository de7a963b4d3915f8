"""A wire that breaks bytes: found, tried again, never delivered."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.integration.transfer_proxy import (
    MIB,
    Breaker,
    Notes,
    Proxy,
    make,
    through,
)

from kvtide.transfer import (
    Access,
    Cancelled,
    Corrupt,
    Endpoint,
    ReadSlice,
    TimedOut,
    TransferError,
    Unreachable,
    WriteSlice,
)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
async def owner(notes: Notes) -> AsyncIterator[Endpoint]:
    async with make("owner", notes) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(owner: Endpoint) -> Iterator[Proxy]:
    proxy = Proxy(owner.address.port)
    yield proxy
    proxy.close()


@pytest.fixture
async def reader(notes: Notes) -> AsyncIterator[Endpoint]:
    async with make("reader", notes) as endpoint:
        yield endpoint


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
