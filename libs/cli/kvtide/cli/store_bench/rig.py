"""A real store and a real client in one process: shared memory, and an in-memory bus."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtide.bus import Identity, MemoryBus, MemoryHub, Node
from kvtide.bus.messages import PutBlock
from kvtide.kv import (
    BlockKey,
    KeySpace,
    Layout,
    Lease,
    Located,
    ModelFacts,
    NodeId,
    RequestId,
    Role,
    SpaceId,
    TenantId,
)
from kvtide.pool import PoolClient
from kvtide.runtime import KvtideError, SystemClock
from kvtide.store.settings import StoreSettings
from kvtide.store.shell import StoreService
from kvtide.transfer import Endpoint

SECRET = b"a secret that only this bench has"
FACTS = ModelFacts(
    name="bench",
    digest="bench",
    layers=12,
    kv_heads=4,
    head_dim=64,
    kv_dtype="float32",
    vocab_size=256,
    max_tokens=1 << 20,
    eos_token_ids=(0,),
    numerics="bench",
    block_tokens=64,
)
"""Its blocks have 1.5 MiB in 24 parts of 64 KiB."""

LAYOUT = Layout.of(FACTS)
SPACE = KeySpace(SECRET, SpaceId(TenantId("bench"), FACTS))
WAIT_S = 60.0


class RigError(KvtideError):
    """The store did not do what the measurement needs."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The store, and the client on its host."""

    store: StoreService
    node: Node
    pool: PoolClient

    async def put(self, keys: Sequence[BlockKey], parts: Sequence[memoryview]) -> None:
        """Begin, fill and commit a batch, then let go of it.

        Raises:
            RigError: a block was not stored.
        """
        lease = Lease(RequestId(f"put-{keys[0].hex()}"), 1, self.node.ref)
        blocks = [PutBlock(key, FACTS.block_tokens) for key in keys]
        put = await self.pool.begin(lease, SPACE.tags, LAYOUT, blocks, timeout_s=WAIT_S)
        try:
            for i in range(len(keys)):
                if not put.writable(i):
                    raise RigError("the store has no room for a block")
                put.write_parts(i, 0, parts)
            await put.commit(timeout_s=WAIT_S)
        finally:
            await put.release()

    async def read(
        self, located: Sequence[Located], targets: Sequence[memoryview]
    ) -> None:
        """Read and verify whole blocks, each into its target.

        Raises:
            RigError: a miss.
        """
        outcomes = await self.pool.read_blocks(
            located,
            SPACE.tags,
            LAYOUT,
            [sink(target) for target in targets],
            timeout_s=WAIT_S,
        )
        for outcome in outcomes:
            if not outcome.ok:
                raise RigError(f"a read missed: {outcome.miss}: {outcome.detail}")

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Make room: what is read must not be evicted by what is put."""
        machine = self.store.machine
        if machine is not None:
            inventory = machine.inventory
            slots = [inventory.index.get(key) for key in keys]
            for slot in slots:
                if slot is not None and inventory.table.evictable(slot):
                    inventory.evict(slot, "removed", self.node.clock.monotonic())

    def located(self, keys: Sequence[BlockKey]) -> list[Located]:
        """Where the copies in DRAM are.

        Raises:
            RigError: one is not there.
        """
        machine = self.store.machine
        found = [] if machine is None else [machine.inventory.copy_of(k) for k in keys]
        there = [each for each in found if each is not None]
        if len(there) != len(keys):
            raise RigError(f"{len(keys) - len(there)} blocks are not in DRAM")
        return there


def sink(target: memoryview) -> Callable[[int], memoryview]:
    """Part after part, back to back."""
    size = LAYOUT.part_bytes
    return lambda part: target[part * size : (part + 1) * size]


def block_keys(count: int, first: int = 0) -> list[BlockKey]:
    """Different for each number; spread as real ones are."""
    return [SPACE.key(None, [number]) for number in range(first, first + count)]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for it.

    Raises:
        RigError: it did not come.
    """
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - of the store's threads
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise RigError(f"not within {WAIT_S:.0f} s: {what}") from None


@asynccontextmanager
async def rig(folder: Path, shm_dir: Path, **settings: object) -> AsyncGenerator[Rig]:
    """Both, until the context ends."""
    async with AsyncExitStack() as stack:
        clock = SystemClock()
        hub = MemoryHub(clock)
        stack.push_async_callback(hub.close)
        node = await _node(stack, hub, "bench-store", Role.STORE, shm_dir)
        given = {"node": "bench-store", "shm_dir": shm_dir, "state_dir": folder}
        known = StoreSettings.model_validate({**given, **settings})
        store = StoreService(node, known, CollectorRegistry())
        await store.start()
        stack.push_async_callback(store.close)
        worker = await _node(stack, hub, "bench-worker", Role.PREFILL, shm_dir)
        pool = PoolClient(worker, registry=CollectorRegistry())
        await stack.enter_async_context(pool)
        await until(lambda: pool.ready, "the client found the store")
        yield Rig(store, worker, pool)


async def _node(
    stack: AsyncExitStack, hub: MemoryHub, name: str, role: Role, shm_dir: Path
) -> Node:
    clock = SystemClock()
    identity = Identity(NodeId(name), epoch=1)
    endpoint = Endpoint(node=name, epoch=1, secret=SECRET, clock=clock, shm_dir=shm_dir)
    await stack.enter_async_context(endpoint)
    bus = MemoryBus(hub, identity, cluster="bench", endpoint=endpoint)
    await stack.enter_async_context(bus)
    node = Node(
        roles=(role,),
        bus=bus,
        endpoint=endpoint,
        identity=identity,
        clock=clock,
        secret=SECRET,
        host=endpoint.address.shm_host,
    )
    return await stack.enter_async_context(node)
