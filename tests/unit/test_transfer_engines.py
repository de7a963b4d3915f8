"""Foreign engines as a way for bytes, with a pretended one: copies within this process."""

import ctypes
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from pydantic import ValidationError
from tests.contract.transfer_world import MIB, SECRET, pattern

from kvtide.runtime import SystemClock
from kvtide.runtime.settings import RoleSettings
from kvtide.transfer import (
    Access,
    AccessDenied,
    Cancelled,
    Endpoint,
    Engine,
    MooncakeEngine,
    NixlEngine,
    ReadSlice,
    Refused,
    TimedOut,
    Unreachable,
    WriteSlice,
    engine_named,
)
from kvtide.transfer.engines import mooncake, nixl
from kvtide.transfer.engines.seam import Flight
from kvtide.transfer.engines.slabs import SLAB_BYTES, Slabs
from kvtide.transfer.engines.wire import (
    Opened,
    pack_opened,
    pack_slot_ask,
    unpack_opened,
    unpack_slot_ask,
)
from kvtide.transfer.peer import SocketPeer
from kvtide.transfer.wire import Ask, FrameError


class PretendedFlight(Flight):
    def __init__(self, engine: "PretendedEngine", move: tuple[int, int, int]) -> None:
        self._engine, self._move = engine, move

    def landed(self) -> bool:
        engine = self._engine
        if engine.broken:
            raise Unreachable("broken")
        if not engine.free.is_set():
            return False
        to, source, length = self._move
        ctypes.memmove(to, source, length)
        if engine.flips:
            engine.flips -= 1
            byte = (ctypes.c_ubyte * length).from_address(to)
            byte[length // 2] ^= 1
        engine.moved += length
        return True

    def over(self) -> bool:
        return self._engine.free.is_set()


class PretendedEngine(Engine):
    """Moves at the moment at which it is asked how far it is."""

    name = "pretended"

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.broken = False
        self.flips = self.moved = 0
        self.known: list[tuple[int, int]] = []
        self.closed = False

    def open(self, host: str) -> None:
        assert host == "127.0.0.1"

    def register(self, address: int, length: int) -> None:
        self.known.append((address, length))

    def describe(self, address: int, length: int) -> bytes:
        assert (address, length) in self.known
        return b"here"

    def meet(self, description: bytes) -> str:
        return description.decode()

    def begin(
        self, peer: str, *, writes: bool, here: int, there: int, length: int
    ) -> Flight:
        assert peer == "here"
        assert any(at <= here and here + length <= at + n for at, n in self.known)
        to, source = (there, here) if writes else (here, there)
        return PretendedFlight(self, (to, source, length))

    def close(self) -> None:
        self.closed = True


class Two:
    """An owner and a reader, each with an engine."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.ours, self.theirs = PretendedEngine(), PretendedEngine()

    async def endpoint(self, node: str, engine: Engine | None) -> Endpoint:
        return await self.stack.enter_async_context(
            Endpoint(
                node=node,
                epoch=1,
                secret=SECRET,
                clock=SystemClock(),
                shm_dir=None,
                lanes=1,
                engine=engine,
            )
        )

    async def meet(self, *, owner_has_one: bool = True) -> SocketPeer:
        self.owner = await self.endpoint(
            "owner", self.theirs if owner_has_one else None
        )
        self.reader = await self.endpoint("reader", self.ours)
        self.region = self.owner.register(bytearray(pattern(3 * MIB)), name="arena")
        return await self.reader.connect(self.owner.address)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        made = Two(stack)
        yield made
    assert made.ours.closed


async def test_bytes_go_by_the_engine_both_ways(two: Two) -> None:
    peer = await two.meet()
    assert peer.path == "pretended"
    into = memoryview(bytearray(2 * MIB + 5))
    read = [ReadSlice(two.region.handle(), 3, into)]
    result = await peer.read(read, timeout_s=40)
    assert result.path == "pretended"
    assert into == pattern(3 * MIB)[3:][: len(into)]
    source = memoryview(pattern(MIB + 7, seed=9))
    write = [WriteSlice(two.region.handle(Access.WRITE), MIB, source)]
    result = await peer.write(write, timeout_s=40)
    assert result.path == "pretended"
    assert two.region.view[MIB:][: len(source)] == source
    assert two.ours.moved == len(into) + len(source)


@pytest.mark.parametrize("writes", [False, True])
async def test_a_wrong_byte_is_seen_and_tried_again(two: Two, writes: bool) -> None:
    peer = await two.meet()
    two.ours.flips = 1
    if writes:
        source = memoryview(pattern(5000, seed=2))
        write = [WriteSlice(two.region.handle(Access.WRITE), 0, source)]
        await peer.write(write, timeout_s=40)
        assert two.region.view[:5000] == source
    else:
        into = memoryview(bytearray(5000))
        await peer.read([ReadSlice(two.region.handle(), 0, into)], timeout_s=40)
        assert into == pattern(5000)
    assert two.ours.flips == 0
    assert sum(each.failures for each in peer.rails()) == 1


async def test_an_engine_that_fails_leaves_tcp(two: Two) -> None:
    peer = await two.meet()
    two.ours.broken = True
    into = memoryview(bytearray(5000))
    slices = [ReadSlice(two.region.handle(), 0, into)]
    result = await peer.read(slices, timeout_s=40)
    assert result.path == "tcp"
    assert into == pattern(5000)


async def test_a_peer_without_the_engine_is_reached_by_tcp(two: Two) -> None:
    peer = await two.meet(owner_has_one=False)
    assert peer.path == "tcp"
    into = memoryview(bytearray(5000))
    await peer.read([ReadSlice(two.region.handle(), 0, into)], timeout_s=40)
    assert into == pattern(5000)
    two.theirs.close()


async def test_rights_are_the_owners_to_check(two: Two) -> None:
    peer = await two.meet()
    source = memoryview(b"never")
    with pytest.raises(AccessDenied):
        await peer.write([WriteSlice(two.region.handle(), 0, source)], timeout_s=40)
    assert two.region.view[:5] == pattern(5)


@pytest.mark.parametrize("late", [False, True])
async def test_what_the_engine_does_late_reaches_no_target(
    two: Two, late: bool
) -> None:
    """Cancelled, or past its deadline: the target is free though the engine is not."""
    peer = await two.meet()
    two.ours.free.clear()
    into = memoryview(bytearray(5000))
    slices = [ReadSlice(two.region.handle(), 0, into)]
    transfer = peer.read(slices, timeout_s=0.2 if late else 30)
    if not late:
        transfer.cancel()
    with pytest.raises(TimedOut if late else Cancelled):
        await transfer
    two.ours.free.set()
    assert into == bytes(5000)
    await peer.read(slices, timeout_s=10)
    assert into == pattern(5000)


class StoppedClock(SystemClock):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_slab_rests_until_its_flights_are_over() -> None:
    engine, clock = PretendedEngine(), StoppedClock()
    slabs = Slabs(engine, clock)
    first = slabs.take()
    engine.free.clear()
    slabs.give_back(first, [PretendedFlight(engine, (0, 0, 0))])
    clock.now_s = 60.0
    second = slabs.take()
    assert second is not first
    engine.free.set()
    assert slabs.take() is first
    slabs.give_back(second)
    third = slabs.take()
    assert third is not second
    clock.now_s = 120.0
    assert slabs.take() is second
    assert [length for _, length in engine.known] == [SLAB_BYTES] * 3
    slabs.close()
    assert engine.closed


def test_frames_hold_what_was_put_in() -> None:
    opened = Opened(1 << 47, SLAB_BYTES, b"metadata")
    assert unpack_opened(pack_opened(opened)) == opened
    ask = Ask([(7, bytes(25))], [(0, 5, 6), (0, 100, 1)], "reuse")
    slot, digests, found = unpack_slot_ask(pack_slot_ask(3, [1 << 63, 2], ask))
    assert (slot, digests) == (3, (1 << 63, 2))
    assert list(found.grants) == ask.grants
    assert list(found.pieces) == ask.pieces
    for bad in (b"", b"\0" * 3, pack_slot_ask(3, [1], ask)[:9]):
        with pytest.raises(FrameError):
            unpack_slot_ask(bad)
    with pytest.raises(FrameError):
        unpack_opened(b"short")


@pytest.mark.parametrize("engine", [NixlEngine(), MooncakeEngine()])
def test_an_engine_that_is_not_installed_says_what_to_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    for module in (nixl, mooncake):
        monkeypatch.setattr(module.importlib, "import_module", absent)
    with pytest.raises(Refused, match=rf"kvtide\[{engine.name}\]"):
        engine.open("127.0.0.1")


@pytest.mark.parametrize(
    ("text", "kind", "made_with"),
    [
        ("", None, {}),
        ("nixl", NixlEngine, {"_backend_name": "UCX"}),
        ("nixl:LIBFABRIC", NixlEngine, {"_backend_name": "LIBFABRIC"}),
        ("mooncake", MooncakeEngine, {"_protocol": "tcp", "_device": ""}),
        (
            "mooncake:rdma:mlx5_0",
            MooncakeEngine,
            {"_protocol": "rdma", "_device": "mlx5_0"},
        ),
    ],
)
def test_a_setting_names_an_engine(
    text: str, kind: type[Engine] | None, made_with: dict[str, str]
) -> None:
    engine = engine_named(RoleSettings(transfer_engine=text).transfer_engine)
    assert (type(engine) if engine else None) is kind
    assert made_with.items() <= (vars(engine) if engine else {}).items()


@pytest.mark.parametrize(
    "text", ["ucx", "nixl:UCX:x", "nixl:", "mooncake:", "mooncake:a:b:c"]
)
def test_what_names_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="transfer_engine"):
        RoleSettings(transfer_engine=text)
