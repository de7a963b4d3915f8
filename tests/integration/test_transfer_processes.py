"""Transfers between real processes, and what remains when one is killed."""

# ruff: noqa: S108, S603, T201, ASYNC240 - it runs itself, which prints, in /dev/shm

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    Endpoint,
    EndpointAddress,
    ReadSlice,
    RegionHandle,
    Unreachable,
    WriteSlice,
    sweep_shm,
)

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20
SIZE = 64 * MIB
BLOCK = bytes(range(256)) * 4096


def address_in(data: dict[str, Any]) -> EndpointAddress:
    return EndpointAddress(**data)


def handle_in(data: dict[str, Any]) -> RegionHandle:
    capability = bytes.fromhex(data.pop("capability"))
    return RegionHandle(**data, capability=capability)


async def own(shm_dir: str, epoch: int) -> None:
    """The owner's process: says where it is, then lives until its input ends."""
    async with Endpoint(
        node="owner",
        epoch=epoch,
        secret=SECRET,
        clock=SystemClock(),
        shm_dir=Path(shm_dir) if shm_dir else None,
    ) as endpoint:
        region = endpoint.allocate(SIZE, name="arena")
        for start in range(0, SIZE, MIB):
            region.view[start : start + MIB] = BLOCK
        endpoint.on_peer_gone(
            lambda node, number: print(json.dumps(["gone", node, number]), flush=True)
        )
        address = endpoint.address
        handle = region.handle(Access.WRITE)
        print(
            json.dumps(
                {
                    "address": {
                        name: getattr(address, name) for name in address.__slots__
                    },
                    "handle": {
                        name: getattr(handle, name)
                        for name in handle.__slots__
                        if name != "capability"
                    }
                    | {"capability": handle.capability.hex()},
                }
            ),
            flush=True,
        )
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps(xxhash.xxh3_64_intdigest(region.view)), flush=True)


class Owner:
    """An owner in a process of its own."""

    def __init__(self, shm_dir: Path | None, epoch: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(shm_dir or ""), str(epoch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = json.loads(self._line())
        self.address = address_in(said["address"])
        self.handle = handle_in(said["handle"])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def hears(self) -> Any:
        return json.loads(self._line())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["shm", "tcp"])
def shm_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    if request.param == "tcp":
        yield None
        return
    # a directory of our own, so that its leftovers can be counted
    folder = Path("/dev/shm") / f"kvtide-test-{tmp_path.name}-{os.getpid()}"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.fixture
def owner(shm_dir: Path | None) -> Iterator[Owner]:
    owner = Owner(shm_dir)
    try:
        yield owner
    finally:
        owner.kill()
        for pipe in (owner.process.stdin, owner.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if shm_dir is not None:
            sweep_shm(shm_dir)


@pytest.fixture
async def reader(owner: Owner, shm_dir: Path | None) -> AsyncIterator[Endpoint]:
    async with Endpoint(
        node="reader", epoch=5, secret=SECRET, clock=SystemClock(), shm_dir=shm_dir
    ) as endpoint:
        yield endpoint


async def test_read_and_write(
    owner: Owner, reader: Endpoint, shm_dir: Path | None
) -> None:
    peer = await reader.connect(owner.address)
    assert peer.path == ("tcp" if shm_dir is None else "shm")
    into = bytearray(SIZE)
    view = memoryview(into)
    slices = [
        ReadSlice(owner.handle, start, view[start : start + MIB])
        for start in range(0, SIZE, MIB)
    ]
    result = await peer.read(slices, timeout_s=30)
    assert into == BLOCK * (SIZE // MIB)
    assert set(result.xxh3) == {xxhash.xxh3_64_intdigest(BLOCK)}

    news = os.urandom(3 * MIB)
    into[12345 : 12345 + len(news)] = news
    await peer.write([WriteSlice(owner.handle, 12345, memoryview(news))], timeout_s=30)
    owner.end()
    assert await asyncio.to_thread(owner.hears) == xxhash.xxh3_64_intdigest(into)


async def test_owner_hears_of_a_gone_reader(owner: Owner, reader: Endpoint) -> None:
    await reader.connect(owner.address)
    await reader.close()
    assert await asyncio.to_thread(owner.hears) == ["gone", "reader", 5]


async def test_owner_killed_in_mid_read(
    owner: Owner, reader: Endpoint, shm_dir: Path | None
) -> None:
    peer = await reader.connect(owner.address)
    view = memoryview(bytearray(SIZE))
    slices = [ReadSlice(owner.handle, 0, view)]
    await peer.read(slices, timeout_s=60)

    async def read_on() -> float:
        while True:
            try:
                await peer.read(slices, timeout_s=60)
            except Unreachable:
                return time.perf_counter()

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(read_on())
        await asyncio.sleep(0.05)
        killed = time.perf_counter()
        os.kill(owner.process.pid, signal.SIGKILL)
        noticed = await task
    # seen in milliseconds; far below the 60 s that the reads were given
    assert noticed - killed < 10
    async with asyncio.timeout(40):
        while not peer.gone:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(Unreachable):
        await reader.connect(owner.address)
    owner.process.wait()
    if shm_dir is not None:
        # one file is the dead owner's; the next start there sweeps it
        assert len(list(shm_dir.iterdir())) == 1
        async with Endpoint(
            node="next", epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=shm_dir
        ):
            assert list(shm_dir.iterdir()) == []


async def test_restarted_owner_is_another_epoch(
    owner: Owner, reader: Endpoint, shm_dir: Path | None
) -> None:
    old = await reader.connect(owner.address)
    owner.kill()
    again = Owner(shm_dir, epoch=2)
    try:
        peer = await reader.connect(again.address)
        assert peer is not old
        view = memoryview(bytearray(1000))
        await peer.read([ReadSlice(again.handle, 0, view)], timeout_s=30)
        assert bytes(view) == BLOCK[:1000]
        async with asyncio.timeout(40):
            while not old.gone:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        again.kill()
        for pipe in (again.process.stdin, again.process.stdout):
            assert pipe is not None
            pipe.close()


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], int(sys.argv[2])))
