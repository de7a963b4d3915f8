"""Faults of the in-process fabric, in virtual time."""

import asyncio

import pytest
import xxhash

from kvtide.runtime import ManualClock
from kvtide.transfer import (
    Access,
    Cancelled,
    Corrupt,
    Fault,
    MemoryFabric,
    Operation,
    ReadSlice,
    Refused,
    TimedOut,
    Transfer,
    TransferPeer,
    Unreachable,
    WriteSlice,
)

DATA = bytes(range(100))


class Stage:
    """Two endpoints whose next transfers meet ``fault``."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fault = Fault()
        self.asked: list[tuple[str, str, Operation, int]] = []
        self.fabric = MemoryFabric(self.clock, faults=self.plan)
        self.owner = self.fabric.endpoint(node="owner", epoch=1)
        self.reader = self.fabric.endpoint(node="reader", epoch=1)
        self.region = self.owner.allocate(100, name="arena")
        self.region.view[:] = DATA
        self.into = memoryview(bytearray(100))

    def plan(self, source: str, target: str, operation: Operation, size: int) -> Fault:
        self.asked.append((source, target, operation, size))
        return self.fault

    async def peer(self) -> TransferPeer:
        await self.owner.start()
        await self.reader.start()
        return await self.reader.connect(self.owner.address)

    async def read(self, timeout_s: float = 5.0) -> Transfer:
        peer = await self.peer()
        slices = [ReadSlice(self.region.handle(), 0, self.into)]
        return peer.read(slices, timeout_s=timeout_s)

    async def close(self) -> None:
        await self.reader.close()
        await self.owner.close()


async def test_no_fault_is_done_at_once() -> None:
    stage = Stage()
    transfer = await stage.read()
    assert transfer.done()
    assert transfer.result().xxh3 == (xxhash.xxh3_64_intdigest(DATA),)
    assert stage.asked == [("reader", "owner", Operation.READ, 100)]
    await stage.close()


async def test_delay() -> None:
    stage = Stage()
    stage.fault = Fault(delay_s=2.0)
    transfer = await stage.read()
    await stage.clock.advance(1.9)
    assert not transfer.done()
    assert bytes(stage.into) == bytes(100)
    await stage.clock.advance(0.2)
    assert transfer.done()
    assert bytes(stage.into) == DATA
    await stage.close()


@pytest.mark.parametrize("fault", [Fault(drop=True), Fault(delay_s=60.0)])
async def test_nothing_comes(fault: Fault) -> None:
    stage = Stage()
    stage.fault = fault
    transfer = await stage.read(timeout_s=3.0)
    await stage.clock.advance(2.9)
    assert not transfer.done()
    await stage.clock.advance(0.2)
    with pytest.raises(TimedOut):
        transfer.result()
    await stage.close()


async def test_cancel_a_slow_one() -> None:
    stage = Stage()
    stage.fault = Fault(delay_s=2.0)
    transfer = await stage.read()
    transfer.cancel()
    with pytest.raises(Cancelled):
        await transfer
    assert bytes(stage.into) == bytes(100)
    await stage.close()


async def test_corrupt_is_found() -> None:
    stage = Stage()
    stage.fault = Fault(corrupt=True)
    with pytest.raises(Corrupt) as caught:
        await (await stage.read())
    assert (caught.value.node, caught.value.slice_index) == ("owner", 0)
    await stage.close()


async def test_flip_is_the_callers_to_find() -> None:
    stage = Stage()
    stage.fault = Fault(flip=True)
    result = await (await stage.read())
    assert stage.into[0] == DATA[0] ^ 0xFF
    assert bytes(stage.into[1:]) == DATA[1:]
    assert result.xxh3 == (xxhash.xxh3_64_intdigest(stage.into),)
    assert result.xxh3 != (xxhash.xxh3_64_intdigest(DATA),)
    await stage.close()


async def test_cut() -> None:
    stage = Stage()
    stage.fault = Fault(unreachable=True)
    with pytest.raises(Unreachable):
        await (await stage.read())
    stage.fault = Fault()
    await (await stage.read())
    await stage.close()


async def test_writes_meet_faults_too() -> None:
    stage = Stage()
    peer = await stage.peer()
    write = [WriteSlice(stage.region.handle(Access.WRITE), 0, memoryview(b"new"))]
    stage.fault = Fault(unreachable=True)
    with pytest.raises(Unreachable):
        await peer.write(write, timeout_s=5)
    assert bytes(stage.region.view) == DATA
    stage.fault = Fault()
    await peer.write(write, timeout_s=5)
    assert bytes(stage.region.view[:3]) == b"new"
    await stage.close()


async def test_a_killed_owner_ends_what_is_under_way() -> None:
    stage = Stage()
    gone: list[tuple[str, int]] = []
    stage.reader.on_peer_gone(lambda node, epoch: gone.append((node, epoch)))
    stage.fault = Fault(delay_s=2.0)
    transfer = await stage.read()
    back = await stage.owner.connect(stage.reader.address)
    stage.owner.kill()
    with pytest.raises(Unreachable):
        await transfer
    assert gone == [("owner", 1)]
    assert not back.gone
    with pytest.raises(Unreachable):
        await stage.reader.connect(stage.owner.address)
    await stage.reader.close()


async def test_hosts_share_no_memory() -> None:
    fabric = MemoryFabric(ManualClock())
    async with (
        fabric.endpoint(node="a", epoch=1, host="one") as owner,
        fabric.endpoint(node="b", epoch=1, host="two") as reader,
    ):
        region = owner.allocate(10, name="arena")
        peer = await reader.connect(owner.address)
        with pytest.raises(Refused, match="another host"):
            peer.map(region.handle())
        near = await owner.connect(owner.address)
        assert near.map(region.handle()).readonly
        bare = owner.register(bytearray(3), name="bare")
        with pytest.raises(Refused, match="no shared memory"):
            near.map(bare.handle())


async def test_two_runs_are_the_same() -> None:
    async def run() -> list[float]:
        stage = Stage()
        peer = await stage.peer()
        ends: list[float] = []
        for number in range(5):
            stage.fault = Fault(delay_s=float(5 - number))
            transfer = peer.read(
                [ReadSlice(stage.region.handle(), 0, stage.into)], timeout_s=30
            )
            transfer.when_ended(lambda: ends.append(stage.clock.monotonic()))
        await stage.clock.advance(10)
        await asyncio.sleep(0)
        await stage.close()
        return ends

    assert await run() == await run() == [1001, 1002, 1003, 1004, 1005]
