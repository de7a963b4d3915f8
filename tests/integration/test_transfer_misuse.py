"""Wrong calls, slow peers and many rights: whose fault it is not, does not feel it."""

import asyncio
import logging
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.transfer_proxy import CLOCK, MIB, SECRET, make

from kvtide.transfer import (
    Access,
    AccessDenied,
    Cancelled,
    Endpoint,
    Operation,
    OutOfBounds,
    Priority,
    ReadSlice,
    Region,
    RegionHandle,
    SocketPeer,
    Transfer,
    TransferError,
    inbound,
)
from kvtide.transfer.dial import Dialer
from kvtide.transfer.rail import RailDownError
from kvtide.transfer.regions import Grant, RegionTable
from kvtide.transfer.requests import Request
from kvtide.transfer.tcp import TcpCarrier

LIMIT_S = 40.0
DATA = os.urandom(MIB)


@pytest.fixture
async def owner() -> AsyncIterator[Endpoint]:
    async with make("owner") as owner:
        yield owner


@pytest.fixture
async def peer(owner: Endpoint) -> AsyncIterator[SocketPeer]:
    async with make("reader") as reader:
        yield await reader.connect(owner.address)


@pytest.fixture
def region(owner: Endpoint) -> Region:
    region = owner.allocate(MIB, name="arena")
    region.view[:] = DATA
    return region


def near(node: str) -> Endpoint:
    return Endpoint(node=node, epoch=1, secret=SECRET, clock=CLOCK)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def read_all(peer: SocketPeer, handle: RegionHandle) -> None:
    into = memoryview(bytearray(MIB))
    await peer.read([ReadSlice(handle, 0, into)], timeout_s=LIMIT_S)
    assert into == DATA


async def test_a_call_that_no_check_foresaw_ends_and_harms_nobody_else(
    peer: SocketPeer, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    into = memoryview(bytearray(200_000))
    wrong: Any = 1.5
    with caplog.at_level(logging.CRITICAL, "kvtide.transfer"):
        transfer = peer.read([ReadSlice(region.handle(), wrong, into)], timeout_s=60)
        others = [
            asyncio.ensure_future(read_all(peer, region.handle())) for _ in range(8)
        ]
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(TransferError, match="integer"):
                await transfer
            await asyncio.gather(*others)
    assert transfer.done()
    await read_all(peer, region.handle())


@pytest.mark.parametrize(
    "words", [{"notify": "text"}, {"notify": None}, {"trace": None}, {"purpose": None}]
)
async def test_words_of_another_type_are_refused_at_once(
    peer: SocketPeer, region: Region, words: dict[str, Any]
) -> None:
    into = memoryview(bytearray(100))
    with pytest.raises(OutOfBounds, match="must be"):
        peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=5, **words)


@pytest.mark.parametrize(
    "change", [{"capability": "x" * 25}, {"region": -1}, {"region": "1"}]
)
async def test_a_handle_that_a_codec_mangled_is_refused_at_once(
    peer: SocketPeer, region: Region, change: dict[str, Any]
) -> None:
    into = memoryview(bytearray(100))
    handle = replace(region.handle(), **change)
    with pytest.raises(AccessDenied):
        peer.read([ReadSlice(handle, 0, into)], timeout_s=5)


async def test_a_region_of_another_endpoint_is_not_ours_to_end(
    owner: Endpoint, peer: SocketPeer, region: Region
) -> None:
    async with make("other") as other:
        theirs = other.allocate(MIB, name="theirs")
        assert theirs.number == region.number
        await owner.deregister(theirs)
    await read_all(peer, region.handle())


def nowhere(dialer: Dialer) -> Dialer:
    """To a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = int(gone.getsockname()[1])
    return replace(dialer, address=replace(dialer.address, port=port))


def request_for(region: Region) -> Request:
    transfer = Transfer(
        slice_count=1,
        nbytes=MIB,
        operation=Operation.READ,
        purpose="reuse",
        priority=Priority.FOREGROUND,
        timeout_s=LIMIT_S,
        clock=CLOCK,
    )
    into = memoryview(bytearray(MIB))
    return Request(transfer, None, [into], [region.handle()], [0], MIB)


async def test_a_rail_that_was_cut_is_blamed_when_it_cannot_be_opened_again(
    peer: SocketPeer, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is tried again at once, without a pause, for as long as time is left."""
    held, answering = threading.Event(), threading.Event()
    claim = RegionTable.claim

    def claim_later(
        table: RegionTable, number: int, capability: bytes, access: Access
    ) -> Grant:
        held.set()
        answering.wait(LIMIT_S)
        return claim(table, number, capability, access)

    monkeypatch.setattr(RegionTable, "claim", claim_later)
    reports: queue.Queue[tuple[TransferError | None, bool]] = queue.Queue()
    dialer = peer._dialer  # pyright: ignore[reportPrivateUsage]

    def report(request: Request, error: TransferError | None, blame: bool) -> None:
        del request
        reports.put((error, blame))

    carrier = TcpCarrier("test-rail", dialer, report)

    async def told() -> tuple[TransferError | None, bool]:
        return await asyncio.to_thread(reports.get, timeout=LIMIT_S)

    try:
        first = request_for(region)
        first.transfer.begin(1, carrier.abort)
        carrier.submit(first)
        assert await asyncio.to_thread(held.wait, LIMIT_S)
        first.transfer.cancel()
        assert (await told())[1] is False

        carrier._dialer = nowhere(dialer)  # pyright: ignore[reportPrivateUsage]
        carrier.submit(request_for(region))
        error, blame = await told()
        assert isinstance(error, RailDownError)
        assert blame
    finally:
        answering.set()
        carrier.abort(None)
        await asyncio.to_thread(carrier.join)


async def test_a_peer_that_does_not_read_holds_up_no_deregistration(
    owner: Endpoint, peer: SocketPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, left = threading.Event(), threading.Event()

    def send_nothing(*_: object) -> list[int]:
        sending.set()
        left.wait(LIMIT_S)
        return []

    monkeypatch.setattr(inbound, "send_hashed", send_nothing)
    big = owner.register(bytes(MIB), name="big")
    other = owner.register(bytes(100), name="other")
    into = memoryview(bytearray(MIB))
    transfer = peer.read([ReadSlice(big.handle(), 0, into)], timeout_s=LIMIT_S)
    assert await asyncio.to_thread(sending.wait, LIMIT_S)
    try:
        async with asyncio.timeout(LIMIT_S / 4):
            await owner.deregister(other)
    finally:
        left.set()
        transfer.cancel()
        with pytest.raises(Cancelled):
            await transfer


async def test_rights_that_are_new_each_time_open_a_file_once(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(DATA)
    async with near("owner") as owner, near("reader") as reader:
        region = owner.register_file(path, name="segment")
        peer = await reader.connect(owner.address)
        before = 0
        for number in range(20):
            into = memoryview(bytearray(4096))
            handle = region.handle(ttl_s=100 + number)
            result = await peer.read([ReadSlice(handle, 0, into)], timeout_s=LIMIT_S)
            assert result.path == "file"
            assert into == DATA[:4096]
            if number == 0:
                before = open_files()
        assert open_files() <= before + 4
