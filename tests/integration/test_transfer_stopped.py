"""A peer that is there but does nothing: the others must not notice."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.halting import halt
from tests.integration.test_transfer_processes import BLOCK, MIB, SECRET, Owner

from kvtide.runtime import SystemClock
from kvtide.transfer import Endpoint, ReadSlice, SocketPeer, TransferError, sweep_shm

SHM = Path("/dev/shm")  # noqa: S108 - where shared memory is


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    made = [Owner(SHM), Owner(SHM, 2)]
    try:
        yield made
    finally:
        for owner in made:
            owner.process.send_signal(signal.SIGCONT)
            owner.kill()
            for pipe in (owner.process.stdin, owner.process.stdout):
                assert pipe is not None
                pipe.close()
        sweep_shm(SHM)


def fetch(peer: SocketPeer, owner: Owner, into: memoryview) -> list[ReadSlice]:
    assert peer.path == "shm"
    return [ReadSlice(owner.handle, 0, into)]


@pytest.mark.parametrize("what", ["notify", "map", "read"])
async def test_a_stopped_peer_does_not_stop_the_others(
    owners: list[Owner], what: str
) -> None:
    stopped, well = owners
    async with Endpoint(
        node="reader", epoch=5, secret=SECRET, clock=SystemClock()
    ) as reader:
        silent = await reader.connect(stopped.address)
        peer = await reader.connect(well.address)
        into = memoryview(bytearray(MIB))
        if what == "notify":
            await silent.read(fetch(silent, stopped, into), timeout_s=30)
        halt(stopped.process.pid)
        async with asyncio.TaskGroup() as group:
            places = [memoryview(bytearray(MIB)) for _ in range(4)]
            for place in places:
                slices = fetch(silent, stopped, place)
                note = b"done" if what == "notify" else b""

                async def ask(slices: list[ReadSlice], note: bytes) -> object:
                    if what == "map":
                        return await silent.map_async(stopped.handle)
                    return await silent.read(slices, timeout_s=30, notify=note)

                async def fails(slices: list[ReadSlice], note: bytes) -> None:
                    with pytest.raises(TransferError):
                        await ask(slices, note)

                group.create_task(fails(slices, note))
            # those have begun to wait when the first of them is asked for
            await asyncio.sleep(0)
            for _ in range(3):
                into[:] = bytes(MIB)
                # less than the others wait for an answer
                await peer.read(fetch(peer, well, into), timeout_s=4)
                assert into == BLOCK
            os.kill(stopped.process.pid, signal.SIGKILL)
