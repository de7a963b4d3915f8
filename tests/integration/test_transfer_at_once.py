"""A slice that was sent at once is like any other when things go wrong."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from tests.integration.transfer_proxy import MIB, Notes, Proxy, make, through

from kvtide.transfer import (
    AccessDenied,
    Cancelled,
    Endpoint,
    OutOfBounds,
    ReadSlice,
    Region,
    Transfer,
    TransferError,
    TransferPeer,
)

LIMIT_S = 20.0
DATA = bytes(range(256)) * (MIB // 256)


class Valve:
    """Lets bytes through, or holds them."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def __call__(self, chunk: bytes, total: int) -> bytes:
        del total
        self.open.wait(LIMIT_S)
        return chunk


@pytest.fixture
async def owner() -> AsyncIterator[Endpoint]:
    async with make("owner") as owner:
        yield owner


@pytest.fixture
def region(owner: Endpoint) -> Region:
    region = owner.allocate(MIB, name="arena")
    region.view[:] = DATA
    return region


@pytest.fixture
def proxy(owner: Endpoint) -> Iterator[Proxy]:
    proxy = Proxy(owner.address.port)
    yield proxy
    proxy.close()


def start(peer: TransferPeer, region: Region, size: int = 4096) -> Transfer:
    into = memoryview(bytearray(size))
    return peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=LIMIT_S)


@pytest.mark.parametrize("in_loop", [False, True])
async def test_closing_ends_what_was_sent_and_never_waited_for(
    owner: Endpoint, region: Region, proxy: Proxy, *, in_loop: bool
) -> None:
    valve = Valve()
    proxy.change = valve
    async with make("reader") as reader:
        peer = await reader.connect(through(proxy, owner))
        await start(peer, region)
        valve.open.clear()
        if in_loop:
            transfers = [start(peer, region) for _ in range(3)]
        else:
            transfers = await asyncio.to_thread(
                lambda: [start(peer, region) for _ in range(3)]
            )
        closing = asyncio.ensure_future(reader.close())
        for transfer in transfers:
            with pytest.raises(TransferError):
                await transfer
        valve.open.set()
        await closing


async def test_one_that_is_cancelled_harms_none_behind_it(
    owner: Endpoint, region: Region, proxy: Proxy
) -> None:
    valve, notes = Valve(), Notes()
    proxy.change = valve
    async with make("reader", notes) as reader:
        peer = await reader.connect(through(proxy, owner))
        await start(peer, region)
        valve.open.clear()
        first, second = start(peer, region), start(peer, region)
        first.cancel()
        with pytest.raises(Cancelled):
            await first
        valve.open.set()
        assert (await second).bytes == 4096
    assert notes.failures == ["cancelled"]


async def test_an_owner_says_what_is_wrong_and_the_connection_goes_on(
    owner: Endpoint, region: Region
) -> None:
    """Ahead of and behind requests that are answered, many at a time."""
    async with make("reader") as reader:
        peer = await reader.connect(owner.address)
        good = region.handle()
        long = replace(good, length=2 * MIB)
        forged = replace(good, capability=good.capability[:-1] + b"x")

        def read_all() -> None:
            for _ in range(20):
                kinds = (good, long, good, forged, good)
                views = [memoryview(bytearray(5000)) for _ in kinds]
                transfers = [
                    peer.read(
                        [ReadSlice(handle, MIB if handle is long else 99, view)],
                        timeout_s=LIMIT_S,
                    )
                    for handle, view in zip(kinds, views, strict=True)
                ]
                for index, wrong in ((1, OutOfBounds), (3, AccessDenied)):
                    with pytest.raises(wrong) as caught:
                        transfers[index].wait_blocking()
                    assert caught.value.slice_index == 0
                for index in (0, 2, 4):
                    transfers[index].wait_blocking()
                    assert views[index] == DATA[99 : 99 + 5000]

        await asyncio.to_thread(read_all)
