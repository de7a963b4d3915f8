"""A store and workers in one process, on real shared memory, TCP and NATS."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtide.bus import (
    BlockFollower,
    Identity,
    NatsBus,
    Node,
    NodeTimes,
)
from kvtide.bus.messages import BlockState, Dropped, PutBlock
from kvtide.kv import (
    BlockKey,
    KeySpace,
    Layout,
    Lease,
    Located,
    ModelFacts,
    NodeId,
    NodeRef,
    RequestId,
    Role,
    SpaceId,
    TenantId,
)
from kvtide.pool import PoolClient, PoolLimits, Put, ReadOutcome
from kvtide.runtime import SystemClock
from kvtide.store.drained_mark import DrainedMark
from kvtide.store.rows import BlockRows
from kvtide.store.settings import StoreSettings
from kvtide.store.shell import StoreService
from kvtide.transfer import Endpoint

CLUSTER = "local"
SECRET = b"a secret of this test's cluster!"
FACTS = ModelFacts(
    name="tiny",
    digest="d1",
    layers=2,
    kv_heads=1,
    head_dim=16,
    kv_dtype="float32",
    vocab_size=256,
    max_tokens=4096,
    eos_token_ids=(0,),
    numerics="float32/test",
    block_tokens=16,
)
SPACE = KeySpace(SECRET, SpaceId(TenantId("t"), FACTS))
LAYOUT = Layout.of(FACTS)
LIMIT_S = 40.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds; ``TimeoutError`` says what did not."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - a condition of another process
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise TimeoutError(f"not within {LIMIT_S} s: {what}") from None


def part_bytes(key: bytes, part: int, tokens: int = 16) -> bytes:
    """What the test's model computes for a part: different for every part."""
    seed = bytes([*key, part, 255 - part])
    length = tokens * LAYOUT.token_bytes
    return (seed * (length // len(seed) + 1))[:length]


def keys(count: int, first: int = 0) -> tuple[BlockKey, ...]:
    """Keys of a chain of blocks, different for each ``first``."""
    return SPACE.chain(list(range(first, first + 16 * count)))


@dataclass
class Memory:
    """What an engine would have: private memory for each part of each block."""

    blocks: list[bytearray] = field(default_factory=list[bytearray])

    def sink(self) -> Callable[[int], memoryview]:
        block = bytearray(LAYOUT.parts * LAYOUT.part_bytes)
        self.blocks.append(block)
        size = LAYOUT.part_bytes
        return lambda part: memoryview(block)[part * size : (part + 1) * size]

    def holds(self, i: int, key: bytes) -> bool:
        wanted = b"".join(part_bytes(key, part) for part in range(LAYOUT.parts))
        return bytes(self.blocks[i]) == wanted


@dataclass
class Index:
    """A follower's view of all stores: what the gossip says."""

    located: dict[BlockKey, Located] = field(default_factory=dict[BlockKey, Located])

    def apply(
        self, store: NodeRef, added: Sequence[Located], dropped: Sequence[Dropped]
    ) -> None:
        for gone in dropped:
            known = self.located.get(gone.key)
            if known is not None and known.slot.generation == gone.generation:
                del self.located[gone.key]
        for come in added:
            self.located[come.key] = come

    def forget(self, store: NodeId) -> None:
        self.located = {
            key: located
            for key, located in self.located.items()
            if located.slot.node != store
        }

    def exact(self, store: NodeId, exact: bool) -> None:
        pass


@dataclass
class Worker:
    """A node with a pool client and a follower."""

    node: Node
    pool: PoolClient
    index: Index
    registry: CollectorRegistry

    def lease(self, request: str = "r") -> Lease:
        return Lease(RequestId(request), 1, self.node.ref)

    async def begin(self, blocks: Sequence[BlockKey | None], request: str = "r") -> Put:
        wanted = [PutBlock(key, 16) for key in blocks]
        return await self.pool.begin(self.lease(request), SPACE.tags, LAYOUT, wanted)

    async def store_blocks(
        self, blocks: Sequence[BlockKey], request: str = "r"
    ) -> tuple[BlockState | None, ...]:
        put = await self.begin(blocks, request)
        write(put, blocks)
        states = await put.commit()
        await put.release()
        return states

    async def read(
        self, located: Sequence[Located], memory: Memory
    ) -> list[ReadOutcome]:
        sinks = [memory.sink() for _ in located]
        return await self.pool.read_blocks(
            located, SPACE.tags, LAYOUT, sinks, timeout_s=5.0
        )

    async def located(self, blocks: Sequence[BlockKey]) -> list[Located]:
        await until(
            lambda: all(key in self.index.located for key in blocks), "gossip came"
        )
        return [self.index.located[key] for key in blocks]

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def write(put: Put, blocks: Sequence[BlockKey | None]) -> None:
    for i, key in enumerate(blocks):
        if put.writable(i):
            for part in range(LAYOUT.parts):
                put.write_part(i, part, memoryview(part_bytes(key or b"p", part)))


class World:
    """Nodes on one bus. Leave the context to end everything."""

    def __init__(self, folder: Path, nats: str, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.nats = nats
        self.clock = SystemClock()
        self._stack = stack

    def shm(self, host: str) -> Path:
        """The shared memory of a pretended host."""
        path = self.folder / host
        path.mkdir(exist_ok=True)
        return path

    async def node(
        self,
        name: str,
        role: Role,
        host: str,
        *,
        epoch: int = 1,
        stack: AsyncExitStack | None = None,
    ) -> Node:
        stack = stack or self._stack
        endpoint = Endpoint(
            node=name,
            epoch=epoch,
            secret=SECRET,
            clock=self.clock,
            shm_dir=self.shm(host),
        )
        await stack.enter_async_context(endpoint)
        identity = Identity(NodeId(name), epoch=epoch)
        bus = await NatsBus.open(
            self.nats,
            identity,
            cluster=CLUSTER,
            clock=self.clock,
            endpoint=endpoint,
        )
        await stack.enter_async_context(bus)
        node = Node(
            roles=(role,),
            bus=bus,
            endpoint=endpoint,
            identity=identity,
            clock=self.clock,
            secret=SECRET,
            host=endpoint.address.shm_host,
            times=NodeTimes(),
        )
        return await stack.enter_async_context(node)

    async def store(
        self,
        name: str = "store",
        host: str = "host-0",
        *,
        epoch: int = 1,
        stack: AsyncExitStack | None = None,
        rows: BlockRows | None = None,
        leave: Callable[[], None] | None = None,
        drained: DrainedMark | None = None,
        **values: object,
    ) -> StoreService:
        node = await self.node(name, Role.STORE, host, epoch=epoch, stack=stack)
        settings = StoreSettings.model_validate(
            {
                "node": name,
                "shm_dir": self.shm(host),
                "dram_bytes": 1 << 20,
                "slab_bytes": 1 << 16,
                **values,
            }
        )
        service = StoreService(
            node, settings, CollectorRegistry(), rows, leave=leave, drained=drained
        )
        await service.start()
        (stack or self._stack).push_async_callback(service.close)
        return service

    async def worker(self, name: str = "worker", host: str = "host-0") -> Worker:
        node = await self.node(name, Role.PREFILL, host)
        registry = CollectorRegistry()
        limits = PoolLimits(list_every_s=0.1, arena_retry_s=0.05)
        pool = PoolClient(node, registry=registry, limits=limits)
        await self._stack.enter_async_context(pool)
        index = Index()
        follower = BlockFollower(node, index)
        await follower.start()
        self._stack.push_async_callback(follower.close)
        return Worker(node, pool, index, registry)

    async def linked_worker(self, name: str = "worker", host: str = "host-0") -> Worker:
        worker = await self.worker(name, host)
        await until(lambda: worker.pool.ready, "the worker found its store")
        return worker


@asynccontextmanager
async def world(folder: Path, nats: str) -> AsyncGenerator[World]:
    """An empty world on the server at ``nats``, its pretended hosts in ``folder``."""
    async with AsyncExitStack() as stack:
        yield World(folder, nats, stack)
