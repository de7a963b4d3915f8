"""Real shells of workers on a bus in memory, with a pool and an engine that may fail."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from kvtide.bus import (
    Hop,
    Identity,
    Incoming,
    MemoryBus,
    MemoryHub,
    Node,
    NodeTimes,
    RosterTimes,
)
from kvtide.bus.messages import (
    AnyMessage,
    BlockState,
    DecodeFailed,
    DecodeWork,
    Message,
    NodeState,
    PrefillDone,
    PrefillFailed,
    PrefillWork,
    PutBlock,
    PutSlot,
    SamplingSpec,
    Tokens,
    WorkAccepted,
)
from kvtide.decode.settings import DecodeSettings
from kvtide.decode.shell import DecodeService
from kvtide.engine.loading import LoadedModel
from kvtide.engine.memory import KvRun
from kvtide.engine.runner import Chunk
from kvtide.engine.thread import EngineThread
from kvtide.kv import (
    KeySpace,
    Lease,
    Located,
    ModelFacts,
    NodeId,
    NodeRef,
    RequestId,
    Role,
    SlotRef,
    SpaceId,
    TenantId,
    Tier,
)
from kvtide.pool import MissReason, PoolClient, ReadOutcome
from kvtide.prefill.settings import PrefillSettings
from kvtide.prefill.shell import PrefillService
from kvtide.runtime import SystemClock
from kvtide.transfer import MemoryFabric
from kvtide.worker.service import Chassis

SECRET = b"s" * 32
FACTS = ModelFacts(
    name="m",
    digest="d1",
    layers=2,
    kv_heads=1,
    head_dim=4,
    kv_dtype="float32",
    vocab_size=32,
    max_tokens=512,
    eos_token_ids=(31,),
    numerics="float32/test",
    block_tokens=16,
)
SPACE = KeySpace(SECRET, SpaceId(TenantId("t"), FACTS))
GATEWAY = NodeRef(NodeId("g"), 1)
WORKER = NodeRef(NodeId("w"), 1)
OTHER = NodeRef(NodeId("o"), 1)
LIMIT_S = 20.0
PATIENT = NodeTimes(roster=RosterTimes(dead_after_s=30.0))
"""A busy machine is no dead node."""
M = TypeVar("M", bound=Message)


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - what tasks of others change
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise TimeoutError(f"not within {LIMIT_S} s: {what}") from None


def slot(number: int) -> SlotRef:
    return SlotRef(NodeId("s"), 1, Tier.DRAM, 0, number * 100, 100, 1)


@dataclass
class Put:
    """Slots that take everything."""

    pool: "Pool"
    slots: tuple[PutSlot, ...]
    stored: tuple[Located, ...] = ()

    def writable(self, index: int) -> bool:
        return self.slots[index].slot is not None

    def write_part(self, index: int, number: int, part: memoryview) -> int:
        del index, number, part
        self.pool.fail_if_told("write")
        return 1

    def write_parts(
        self, index: int, first: int, data: Sequence[memoryview]
    ) -> list[int]:
        return [
            self.write_part(index, number, part)
            for number, part in enumerate(data, first)
        ]

    async def commit(self) -> Sequence[BlockState]:
        self.pool.fail_if_told("commit")
        return [BlockState.STORED for _ in self.slots]

    async def release(self) -> None:
        self.pool.released += 1
        self.pool.fail_if_told("release")


@dataclass
class Pool:
    """Stands in for a ``PoolClient``; raises where a test says so."""

    failing: set[str] = field(default_factory=set[str])
    failed: list[str] = field(default_factory=list[str])
    begun: int = 0
    released: int = 0
    ready: bool = True
    store: NodeRef = OTHER

    def fail_if_told(self, what: str) -> None:
        if what in self.failing:
            self.failed.append(what)
            raise RuntimeError(f"{what} fails")

    async def begin(
        self, lease: Lease, tags: object, layout: object, blocks: Sequence[PutBlock]
    ) -> Put:
        del lease, tags, layout
        self.fail_if_told("begin")
        self.begun += 1
        return Put(self, tuple(PutSlot(slot(i)) for i in range(len(blocks))))

    @asynccontextmanager
    async def staged(
        self, located: Sequence[Located], *, timeout_s: float
    ) -> AsyncGenerator[Sequence[Located | None]]:
        del timeout_s
        yield located

    async def read_headers(
        self, located: Sequence[Located], *rest: object, **options: object
    ) -> list[None]:
        del rest, options
        self.fail_if_told("read_headers")
        return [None for _ in located]

    async def read_blocks(
        self, located: Sequence[Located], *rest: object, **options: object
    ) -> list[ReadOutcome]:
        del rest, options
        self.fail_if_told("read_blocks")
        return [ReadOutcome(MissReason.STALE, detail="none here") for _ in located]

    async def read_parts(
        self, reads: Sequence[object], *rest: object, **options: object
    ) -> list[ReadOutcome]:
        del rest, options
        self.fail_if_told("read_parts")
        return [ReadOutcome(MissReason.STALE, detail="none here") for _ in reads]


@dataclass
class Runner:
    """Computes nothing, in all layers; always draws token 7."""

    steps: int = 0

    def step(
        self,
        chunks: Sequence[Chunk],
        on_layer: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Tensor | None]:
        del cancelled
        self.steps += 1
        for layer in range(FACTS.layers):
            if on_layer is not None:
                on_layer(layer)
        return [self.logits(one) if one.want_logits else None for one in chunks]

    def logits(self, chunk: Chunk) -> Tensor:
        del chunk
        return torch.nn.functional.one_hot(torch.tensor(7), FACTS.vocab_size).float()


@dataclass
class Model:
    """Stands in for a ``LoadedModel``; the first ``broken_runs`` can't be made."""

    facts: ModelFacts = FACTS
    runner: Runner = field(default_factory=Runner)
    broken_runs: int = 0
    runs: list[KvRun] = field(default_factory=list[KvRun])
    grammars: None = None
    kv_tokens: int | None = None

    def new_run(self, capacity_tokens: int) -> KvRun:
        if self.broken_runs:
            self.broken_runs -= 1
            raise OSError(12, "Cannot allocate memory")
        self.runs.append(KvRun(FACTS, capacity_tokens))
        return self.runs[-1]

    def engine(self) -> EngineThread:
        return EngineThread(lambda: cast("LoadedModel", self))


@dataclass
class World:
    """One worker's shell, and a gateway that hears what it says."""

    gateway: Node
    node: Node
    pool: Pool
    model: Model
    registry: CollectorRegistry
    role: Role
    heard: list[AnyMessage] = field(default_factory=list[AnyMessage])

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    def text(self, name: str) -> list[int]:
        """The tokens of one answer."""
        mine = [one for one in self.of(Tokens) if one.request == name]
        return [token for one in mine for token in one.ids]

    def failures(self, operation: str) -> float:
        name = f"kvtide_{self.role}_operation_failures_total"
        return self.registry.get_sample_value(name, {"operation": operation}) or 0.0

    async def send(self, hop: Hop, message: Message) -> AnyMessage:
        inbox = self.node.subjects.inbox(self.role, WORKER.node, hop)
        return await self.gateway.bus.request(inbox, message, timeout_s=LIMIT_S)

    async def ask(self, message: PrefillWork | DecodeWork) -> None:
        answer = await self.send(Hop.WORK, message)
        assert isinstance(answer, WorkAccepted), answer

    async def hear(self, incoming: Incoming) -> None:
        self.heard.append(incoming.message)

    async def told(self, name: str, *, failed: bool = False) -> AnyMessage:
        """Wait for the end of ``name``."""
        kinds = (PrefillFailed, DecodeFailed) if failed else (PrefillDone, Tokens)

        def ends() -> list[AnyMessage]:
            return [
                one
                for one in self.heard
                if isinstance(one, kinds)
                and one.request == name
                and not (isinstance(one, Tokens) and one.finish is None)
            ]

        await until(ends, f"{name} ends, failed={failed}: {self.heard}")
        return ends()[0]


@asynccontextmanager
async def world_of(role: Role, pool: Pool, model: Model) -> AsyncGenerator[World]:
    clock = SystemClock()
    hub, fabric = MemoryHub(clock), MemoryFabric(clock)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(hub.close)

        async def node(ref: NodeRef, role: Role) -> Node:
            endpoint = await stack.enter_async_context(
                fabric.endpoint(node=ref.node, epoch=ref.epoch)
            )
            identity = Identity(ref.node, ref.epoch)
            bus = MemoryBus(hub, identity, endpoint=endpoint)
            return await stack.enter_async_context(
                Node(
                    roles=(role,),
                    bus=await stack.enter_async_context(bus),
                    identity=identity,
                    clock=clock,
                    secret=SECRET,
                    endpoint=endpoint,
                    times=PATIENT,
                )
            )

        gateway, worker = await node(GATEWAY, Role.GATEWAY), await node(WORKER, role)
        registry = CollectorRegistry()
        world = World(gateway, worker, pool, model, registry, role)
        await gateway.inbox(Role.GATEWAY, Hop.TOKENS, world.hear)
        engine = model.engine()
        engine.start()
        stack.push_async_callback(engine.close)
        service = _service(world, engine)
        await service.start()
        stack.push_async_callback(service.close)
        await until(lambda: worker.state is NodeState.READY, "the worker is ready")
        yield world


def _service(world: World, engine: EngineThread) -> PrefillService | DecodeService:
    pool = cast("PoolClient", world.pool)
    chassis = Chassis(world.node, engine, pool, world.registry)
    if world.role is Role.PREFILL:
        return PrefillService(chassis, PrefillSettings(drain_s=1))
    decode = DecodeSettings(drain_s=1, kv_tokens=1024, silence_s=0.1)
    return DecodeService(chassis, decode)


def prefill_work(name: str, tokens: int, *, reuse: int = 0) -> PrefillWork:
    ids = [i % 30 for i in range(tokens)]
    keys = SPACE.chain(ids)
    return PrefillWork(
        request=RequestId(name),
        attempt=1,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        salt="",
        model="m",
        tokens=tuple(ids),
        keys=keys,
        reuse=tuple(Located(key, slot(i), i) for i, key in enumerate(keys[:reuse])),
        decode=OTHER,
        deadline_ms=60_000,
    )


def decode_work(
    name: str, tokens: int, *, reuse: int = 0, prefill: NodeRef | None = None
) -> DecodeWork:
    asked = prefill_work(name, tokens, reuse=reuse)
    return DecodeWork(
        request=asked.request,
        attempt=1,
        gateway=GATEWAY,
        tenant=asked.tenant,
        salt="",
        model="m",
        tokens=asked.tokens,
        prompt_tokens=tokens,
        keys=asked.keys,
        reuse=asked.reuse,
        prefill=prefill,
        sampling=SamplingSpec(temperature=0),
        max_new_tokens=4,
        deadline_ms=60_000,
    )
