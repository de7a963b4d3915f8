"""Endpoints that reach each other by one transport, for the contract suite."""

# ruff: noqa: S108

import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import xxhash
from _pytest.mark import ParameterSet

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Endpoint,
    Engine,
    MemoryFabric,
    MooncakeEngine,
    NixlEngine,
    Refused,
    TransferEndpoint,
    TransferPeer,
)
from kvtide.transfer.verbs import device_names

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20


def rdma_devices() -> list[str]:
    try:
        return device_names()
    except Refused:
        return []


RDMA = pytest.param(
    "rdma",
    marks=[
        pytest.mark.rdma,
        pytest.mark.timeout(300),
        pytest.mark.skipif(not rdma_devices(), reason="no RDMA device"),
    ],
)


def _engine_param(name: str, modules: tuple[str, ...]) -> ParameterSet:
    absent = not any(find_spec(module) for module in modules)
    wheel = f"no {name} here: make test-{name} installs it in a place of its own"
    return pytest.param(
        name,
        marks=[pytest.mark.timeout(180), pytest.mark.skipif(absent, reason=wheel)],
    )


ENGINES = (
    _engine_param("nixl", ("nixl_cu12", "nixl_cu13")),
    _engine_param("mooncake", ("mooncake",)),
)
TRANSPORTS = ("memory", "shm", "tcp", "private", "file", RDMA, *ENGINES)


def make_engine(name: str) -> Engine | None:
    """A foreign engine, not open; None for what is none."""
    return {"nixl": NixlEngine, "mooncake": MooncakeEngine}.get(name, lambda: None)()


class World:
    """Makes endpoints that reach each other by one transport."""

    def __init__(self, transport: str, stack: AsyncExitStack) -> None:
        self.transport = transport
        self._stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._fabric = MemoryFabric(SystemClock())

    @property
    def path(self) -> str:
        """What the peers must say."""
        return "shm" if self.transport in ("private", "file") else self.transport

    @property
    def mappable(self) -> bool:
        return self.transport in ("memory", "shm")

    async def endpoint(
        self, node: str, epoch: int = 1, secret: bytes = SECRET
    ) -> TransferEndpoint:
        return await self._stack.enter_async_context(
            self.make(node=node, epoch=epoch, secret=secret)
        )

    def make(self, *, node: str, epoch: int, secret: bytes) -> TransferEndpoint:
        if self.transport == "memory":
            return self._fabric.endpoint(node=node, epoch=epoch, secret=secret)
        by_shm = self.transport in ("shm", "private", "file")
        return Endpoint(
            node=node,
            epoch=epoch,
            secret=secret,
            clock=SystemClock(),
            shm_dir=Path("/dev/shm") if by_shm else None,
            rdma_devices=None if self.transport == "rdma" else (),
            engine=make_engine(self.transport),
        )


class Pair:
    """An owner with a region full of known bytes, and a reader."""

    def __init__(
        self, world: World, owner: TransferEndpoint, reader: TransferEndpoint
    ) -> None:
        self.world = world
        self.owner = owner
        self.reader = reader
        if world.transport == "private":
            # registered memory has no name that others could map
            self.region = owner.register(bytearray(MIB), name="arena")
        elif world.transport == "file":
            assert isinstance(owner, Endpoint)
            path = world.folder / "segment"
            path.write_bytes(bytes(MIB))
            self.region = owner.register_file(path, name="arena", writable=True)
        else:
            self.region = owner.allocate(MIB, name="arena")
        self.region.view[:] = pattern(MIB)

    async def peer(self) -> TransferPeer:
        return await self.reader.connect(self.owner.address)


def pattern(size: int, seed: int = 1) -> bytes:
    block = b"".join(
        xxhash.xxh3_64_digest(index.to_bytes(4, "little"), seed=seed)
        for index in range(512)
    )
    return (block * (size // len(block) + 1))[:size]


@asynccontextmanager
async def open_world(transport: str) -> AsyncGenerator[World]:
    async with AsyncExitStack() as stack:
        yield World(transport, stack)


async def make_pair(world: World) -> Pair:
    return Pair(world, await world.endpoint("owner"), await world.endpoint("reader"))
