"""Memory that cannot come by the short way: said once per peer, remembered, and it comes."""

import doctest
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kvtide.transfer
from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    Endpoint,
    ReadSlice,
    Refused,
    Region,
    SocketPeer,
    WriteSlice,
    mappings,
)
from kvtide.transfer.asking import THREADS, Asking
from kvtide.transfer.control import Control
from kvtide.transfer.shm import Attached
from kvtide.transfer.wire import Kind

SECRET = b"the secret of this test's cluster"
SIZE = 64 << 10
CLOCK = SystemClock()


def make(node: str) -> Endpoint:
    return Endpoint(node=node, epoch=1, secret=SECRET, clock=CLOCK)


@pytest.fixture
async def owner() -> AsyncIterator[Endpoint]:
    async with make("owner") as endpoint:
        yield endpoint


@pytest.fixture
async def reader() -> AsyncIterator[Endpoint]:
    async with make("reader") as endpoint:
        yield endpoint


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """What owners were asked over control connections."""
    found: list[Kind] = []
    ask = Control.ask

    def note(self: Control, kind: Kind, body: bytes, timeout_s: float) -> bytes:
        found.append(kind)
        return ask(self, kind, body, timeout_s)

    monkeypatch.setattr(Control, "ask", note)
    return found


async def read(peer: SocketPeer, region: Region) -> str:
    into = memoryview(bytearray(SIZE))
    result = await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=10)
    assert into == region.view
    return result.path


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if "by the network" in each.getMessage()
    ]


@pytest.mark.parametrize("name", ["d" * 200 + "/" + "e" * 200, "räum/größe \udcff"])
async def test_long_and_foreign_names_are_no_hindrance(
    tmp_path: Path, owner: Endpoint, reader: Endpoint, name: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(os.urandom(SIZE))
    region = owner.register_file(path, name="segment")
    assert region.handle().shm_name.isascii()
    peer = await reader.connect(owner.address)
    assert await read(peer, region) == "file"


async def test_files_of_another_host_are_not_asked_for(
    tmp_path: Path,
    owner: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[Kind],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvtide.transfer")
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(SIZE))
    regions = [owner.register_file(path, name="segment") for _ in range(2)]
    monkeypatch.setattr("kvtide.transfer.files.boot_id", lambda: "0" * 32)
    async with make("reader") as reader:
        peer = await reader.connect(owner.address)
        for _ in range(3):
            assert [await read(peer, each) for each in regions] == ["tcp", "tcp"]
    assert asked == []
    (line,) = said(caplog)
    assert "another host" in line


async def test_a_file_that_is_not_here_is_asked_for_once(
    tmp_path: Path,
    owner: Endpoint,
    reader: Endpoint,
    asked: list[Kind],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(SIZE))
    region = owner.register_file(path, name="segment")
    path.unlink()
    peer = await reader.connect(owner.address)
    for _ in range(3):
        assert await read(peer, region) == "tcp"
    assert asked == [Kind.MAP]
    (line,) = said(caplog)
    assert "cannot open" in line


async def test_shared_memory_that_cannot_be_mapped_comes_by_network(
    owner: Endpoint,
    reader: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[Kind],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def attach(shm_dir: Path, name: str, length: int, *, writable: bool) -> Attached:
        del shm_dir, name, length, writable
        raise Refused("cannot open shared memory: Permission denied", path="shm")

    monkeypatch.setattr(mappings, "attach", attach)
    region = owner.allocate(SIZE, name="arena")
    peer = await reader.connect(owner.address)
    for _ in range(3):
        assert await read(peer, region) == "tcp"
    assert asked == [Kind.MAP]
    news = memoryview(os.urandom(SIZE))
    slices = [WriteSlice(region.handle(Access.WRITE), 0, news)]
    assert (await peer.write(slices, timeout_s=10)).path == "tcp"
    assert region.view == news
    with pytest.raises(Refused, match="Permission"):
        await peer.map_async(region.handle())
    (line,) = said(caplog)
    assert "Permission denied" in line


async def test_registered_memory_on_the_same_host_is_said(
    owner: Endpoint, reader: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtide.transfer")
    peer = await reader.connect(owner.address)
    for _ in range(2):
        assert await read(peer, owner.register(bytearray(SIZE), name="mine")) == "tcp"
    (line,) = said(caplog)
    assert "not allocated in shared memory" in line


async def test_few_transfers_may_be_under_way(
    owner: Endpoint, reader: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = owner.register(bytearray(SIZE), name="mine")
    peer = await reader.connect(owner.address)
    monkeypatch.setattr("kvtide.transfer.peer.MOST_UNDER_WAY", 0)
    with pytest.raises(Refused, match="under way"):
        await read(peer, region)
    monkeypatch.undo()
    assert await read(peer, region) == "tcp"


def test_few_questions_may_wait() -> None:
    asking = Asking("peer", most_waiting=3)
    go_on, busy = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        busy.release()
        go_on.wait(20)

    try:
        for _ in range(THREADS):
            asking.submit(work)
            assert busy.acquire(timeout=20)
        for _ in range(3):
            asking.submit(work)
        with pytest.raises(Refused, match="wait for the peer's answers"):
            asking.submit(work)
    finally:
        go_on.set()
        asking.shutdown()


def test_the_examples_of_the_package() -> None:
    found = doctest.testmod(kvtide.transfer)
    assert (found.failed, found.attempted) == (0, 7)
