"""What fails inside an endpoint, and what goes on all the same."""

# pyright: reportPrivateUsage=false
# ruff: noqa: ASYNC240 - a directory in memory is looked at

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.transfer_proxy import CLOCK, MIB, SECRET, Notes, make

from kvtide.transfer import (
    AccessDenied,
    Endpoint,
    MemoryFabric,
    Operation,
    Priority,
    ReadSlice,
    Refused,
    RegionHandle,
    TimedOut,
    Transfer,
    TransferError,
    endpoint as endpoint_module,
)
from kvtide.transfer.line import Line
from kvtide.transfer.mappings import Mappings
from kvtide.transfer.wire import pack_mapped


class Broken(Notes):
    """An observer that raises whatever it hears."""

    def transferred(
        self, path: str, purpose: str, operation: Operation, nbytes: int, seconds: float
    ) -> None:
        raise RuntimeError("transferred")

    def failed(self, path: str, purpose: str, operation: Operation, kind: str) -> None:
        raise RuntimeError("failed")

    def served(
        self, path: str, purpose: str, operation: Operation, nbytes: int
    ) -> None:
        raise RuntimeError("served")


# ---- threads


async def test_the_port_outlives_a_lack_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes()
    start = threading.Thread.start
    lacking = True

    def scarce(self: threading.Thread) -> None:
        if lacking and self.name.startswith("transfer-in-"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    async with make("owner", notes) as owner, make("reader") as reader:
        for _ in range(3):
            with pytest.raises(TransferError):
                await reader.connect(owner.address, timeout_s=2)
        async with asyncio.timeout(40):
            while len(notes.refusals) < 3:  # the last is noted once it is closed
                await CLOCK.sleep(0.01)
        assert len(notes.refusals) == 3
        assert "no thread" in notes.refusals[0]
        lacking = False
        region = owner.register(b"bytes", name="arena")
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(5))
        await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=10)
        assert bytes(into) == b"bytes"


# ---- observers and callbacks


@pytest.mark.parametrize("size", [5, 3 * MIB])
async def test_an_observer_that_raises_keeps_nobody_waiting(size: int) -> None:
    async with make("owner", Broken()) as owner, make("reader", Broken()) as reader:
        data = bytes(size)
        handle = owner.register(data, name="arena").handle()
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(b"x" * size))
        async with asyncio.timeout(20):
            await peer.read([ReadSlice(handle, 0, into)], timeout_s=10)
            assert into == data
            wrong = replace(handle, region=handle.region + 1)
            with pytest.raises(AccessDenied):
                await peer.read([ReadSlice(wrong, 0, into)], timeout_s=10)


async def test_an_observer_that_raises_in_memory() -> None:
    fabric = MemoryFabric(CLOCK)
    async with (
        fabric.endpoint(node="a", epoch=1, observer=Broken()) as owner,
        fabric.endpoint(node="b", epoch=1, observer=Broken()) as reader,
    ):
        handle = owner.register(b"bytes", name="arena").handle()
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(5))
        await peer.read([ReadSlice(handle, 0, into)], timeout_s=10)
        assert bytes(into) == b"bytes"


def test_a_callback_that_raises_keeps_no_other_waiting() -> None:
    transfer = Transfer(
        slice_count=1,
        operation=Operation.READ,
        purpose="test",
        priority=Priority.FOREGROUND,
        timeout_s=10,
        clock=CLOCK,
    )
    transfer.begin(1, lambda _: None)
    heard: list[str] = []

    def broken() -> None:
        raise RuntimeError("a defect")

    transfer.when_ended(broken)
    transfer.when_ended(lambda: heard.append("end"))
    transfer.settle("tcp")
    assert heard == ["end"]


# ---- a rail


def test_a_defect_met_by_a_thread_that_waits_ends_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(endpoint: Endpoint) -> Endpoint:
        await endpoint.start()
        return endpoint

    owner = asyncio.run(start(make("owner")))
    reader = asyncio.run(start(make("reader")))
    try:
        handle = owner.register(b"bytes", name="arena").handle()
        peer = reader.connect_blocking(owner.address)
        into = memoryview(bytearray(5))
        slices = [ReadSlice(handle, 0, into)]
        peer.read(slices, timeout_s=10).wait_blocking()

        def broken(*_: Any) -> TransferError | None:
            raise ValueError("a defect")

        with monkeypatch.context() as patch:
            patch.setattr(Line, "receive", broken)
            with pytest.raises(TransferError, match="a defect"):
                peer.read(slices, timeout_s=10).wait_blocking()
        peer.read(slices, timeout_s=10).wait_blocking()
        assert bytes(into) == b"bytes"
    finally:
        reader.close_blocking()
        owner.close_blocking()


# ---- regions


async def test_a_region_that_stays_in_use_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "DEREGISTER_S", 0.05)
    async with Endpoint(
        node="owner", epoch=1, secret=SECRET, clock=CLOCK, shm_dir=tmp_path
    ) as owner:
        region = owner.allocate(MIB, name="arena")
        assert len(list(tmp_path.iterdir())) == 1

        def never(*_: Any) -> None:
            raise TimedOut("still in use")

        monkeypatch.setattr(type(owner._table), "wait_unused", never)
        with pytest.raises(TimedOut):
            await owner.deregister(region)
        assert list(tmp_path.iterdir()) == []
        # who still looks at it sees memory
        region.view[0] = 1


def mappings(tmp_path: Path, ask: Callable[[bytes], bytes]) -> Mappings:
    return Mappings(tmp_path, "owner", CLOCK, ask)


def test_what_went_is_forgotten_once_nobody_asks(tmp_path: Path) -> None:
    handle = RegionHandle("owner", 1, 7, 10, b"\1" * 25, "kvtide-x")
    found: Mappings

    def ask(body: bytes) -> bytes:
        del body
        # the news that it is gone comes between the answer and its use
        found.forget(7)
        return pack_mapped(10, None, "kvtide-x")

    found = mappings(tmp_path, ask)
    with pytest.raises(AccessDenied, match="gone"):
        found.reach(handle, writable=False)
    for number in range(1000):
        found.forget(number)
    assert not found._gone
    # a name that is none of ours: it got further than before
    found = mappings(tmp_path, lambda _: pack_mapped(10, None, "kvtide-x"))
    with pytest.raises(Refused, match="no name"):
        found.reach(handle, writable=False)


@pytest.mark.parametrize("epoch", [-1, 1 << 64])
def test_an_epoch_has_64_bits(epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch"):
        Endpoint(node="owner", epoch=epoch, secret=SECRET, clock=CLOCK)
