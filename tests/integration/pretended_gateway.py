"""A gateway for tests of workers: sends work itself, acknowledges, lists what it owns."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry
from tests.integration.cluster import Cluster

from kvtide.bus import Incoming, Member, Node, open_node
from kvtide.bus.messages import (
    Ack,
    Cancel,
    DecodeFailed,
    DecodeWork,
    FinishReason,
    Message,
    Owned,
    PrefillDone,
    PrefillFailed,
    PrefillWork,
    Presence,
    PresenceReply,
    SamplingSpec,
    TokenAck,
    Tokens,
    WorkAccepted,
)
from kvtide.kv import (
    BlockKey,
    KeySpace,
    Located,
    ModelFacts,
    NodeRef,
    RequestId,
    RequestRef,
    Role,
    SpaceId,
    TenantId,
)
from kvtide.runtime import SystemClock
from kvtide.runtime.settings import RoleSettings

LIMIT_S = 240.0


WORKER = "worker-0"


@dataclass(slots=True)
class Asked:
    """One request as its gateway knows it."""

    ref: RequestRef
    prompt: tuple[int, ...]
    prefill: NodeRef | None
    decode: NodeRef
    ids: list[int] = field(default_factory=list[int])
    reused_tokens: int | None = None
    finish: FinishReason | None = None
    whole: bool = True
    failed: DecodeFailed | None = None
    prefill_done: PrefillDone | None = None
    prefill_failed: PrefillFailed | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failed is not None


class PretendedGateway:
    """Owns requests at workers, as a gateway does; placement is the test's."""

    def __init__(self, node: Node, tenant: str = "tenant") -> None:
        self.node = node
        self.tenant = TenantId(tenant)
        self.open: dict[RequestRef, Asked] = {}
        self._count = 0
        self._lists = 0

    async def start(self) -> None:
        await self.node.inbox(Role.GATEWAY, "tokens", self._heard)
        self.node.tasks.spawn(self._list(), name="owner lists")

    async def member(self, name: str, *, ready: bool = True) -> Member:
        """Wait for a node."""

        def found() -> Member | None:
            for member in self.node.roster.live():
                if member.node == name and (member.ready or not ready):
                    return member
            return None

        async with asyncio.timeout(LIMIT_S):
            while (member := found()) is None:
                await self.node.clock.sleep(0.02)
        return member

    async def gone(self, name: str) -> None:
        """Wait until a node is live no more."""
        async with asyncio.timeout(LIMIT_S):
            while any(member.node == name for member in self.node.roster.live()):
                await self.node.clock.sleep(0.02)

    def facts(self) -> ModelFacts:
        """The model that the workers serve."""
        for member in self.node.roster.live():
            if member.beat.models:
                return member.beat.models[0]
        raise AssertionError("no worker serves a model")

    def keys(self, tokens: Sequence[int]) -> tuple[BlockKey, ...]:
        space = SpaceId(self.tenant, self.facts())
        return KeySpace(self.node.secret, space).chain(tokens)

    async def pooled(
        self, tokens: Sequence[int], blocks: int, store: str = "store-0"
    ) -> tuple[Located, ...]:
        """Wait until a store has the first ``blocks`` blocks of ``tokens``."""
        async with asyncio.timeout(LIMIT_S):
            while len(copies := await self.located(tokens, store)) < blocks:
                await self.node.clock.sleep(0.05)
        return copies

    async def located(self, tokens: Sequence[int], store: str) -> tuple[Located, ...]:
        """What a store has of the full blocks of ``tokens``."""
        inbox = self.node.subjects.inbox(
            Role.STORE, (await self.member(store)).node, "query"
        )
        reply = await self.node.bus.request(
            inbox, Presence(keys=self.keys(tokens)), timeout_s=5
        )
        assert isinstance(reply, PresenceReply), reply
        return reply.located

    async def send(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        prefill: str | None = "prefill-0",
        decode: str = "decode-0",
        reuse: Sequence[Located] = (),
        sampling: SamplingSpec | None = None,
        ignore_eos: bool = True,
        deadline_ms: float = 240_000,
    ) -> Asked:
        """Send the work to both workers; they must accept."""
        self._count += 1
        me = self.node.ref
        ref = RequestRef(RequestId(f"{me.node}-{me.epoch}-{self._count}"), 1)
        prefill_ref = (await self.member(prefill)).ref if prefill else None
        decode_ref = (await self.member(decode)).ref
        asked = Asked(ref, tuple(prompt), prefill_ref, decode_ref)
        self.open[ref] = asked
        model, keys = self.facts().name, self.keys(prompt)
        if prefill_ref is not None:
            await self._request(
                Role.PREFILL,
                prefill_ref,
                PrefillWork(
                    request=ref.request,
                    attempt=ref.attempt,
                    gateway=self.node.ref,
                    tenant=self.tenant,
                    salt="",
                    model=model,
                    tokens=tuple(prompt),
                    keys=keys,
                    reuse=tuple(reuse),
                    decode=decode_ref,
                    deadline_ms=deadline_ms,
                ),
            )
        await self._request(
            Role.DECODE,
            decode_ref,
            DecodeWork(
                request=ref.request,
                attempt=ref.attempt,
                gateway=self.node.ref,
                tenant=self.tenant,
                salt="",
                model=model,
                tokens=tuple(prompt),
                prompt_tokens=len(prompt),
                keys=keys,
                reuse=tuple(reuse),
                prefill=prefill_ref,
                sampling=sampling or SamplingSpec(temperature=0),
                max_new_tokens=max_new_tokens,
                ignore_eos=ignore_eos,
                deadline_ms=deadline_ms,
            ),
        )
        return asked

    async def ask(
        self, prompt: Sequence[int], max_new_tokens: int, **fields: object
    ) -> Asked:
        """Send, and wait for the end."""
        asked = await self.send(prompt, max_new_tokens, **fields)  # pyright: ignore[reportArgumentType]
        return await self.finished(asked)

    async def finished(self, asked: Asked) -> Asked:
        """Wait for the end; a failure is an assertion."""
        await self.until(asked, lambda: asked.ended)
        assert asked.failed is None, asked.failed
        assert asked.whole, "token events had a gap or a repeat"
        return asked

    async def until(self, asked: Asked, condition: object) -> None:
        """Wait until ``condition()`` holds; it is looked at when something comes."""
        assert callable(condition)
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                asked.changed.clear()
                await asked.changed.wait()

    async def cancel(self, asked: Asked, *, wait: bool = True) -> None:
        """Cancel at both workers; ``wait`` for their acknowledgement."""
        self.open.pop(asked.ref, None)
        message = Cancel(
            request=asked.ref.request, attempt=asked.ref.attempt, reason="test"
        )
        for role, ref in ((Role.PREFILL, asked.prefill), (Role.DECODE, asked.decode)):
            if ref is None:
                continue
            inbox = self.node.subjects.inbox(role, ref.node, "control")
            if wait:
                reply = await self.node.bus.request(inbox, message, timeout_s=5)
                assert isinstance(reply, Ack)
            else:
                await self.node.bus.publish(inbox, message)

    async def _request(self, role: Role, to: NodeRef, work: Message) -> None:
        inbox = self.node.subjects.inbox(role, to.node, "work")
        reply = await self.node.bus.request(inbox, work, timeout_s=5)
        assert isinstance(reply, WorkAccepted), reply

    async def _heard(self, incoming: Incoming) -> None:
        match incoming.message:
            case Tokens() as tokens:
                await self._tokens(tokens)
            case DecodeFailed() | PrefillDone() | PrefillFailed() as said:
                asked = self.open.get(RequestRef(said.request, said.attempt))
                if asked is None:
                    return
                match said:
                    case DecodeFailed():
                        asked.failed = said
                    case PrefillDone():
                        asked.prefill_done = said
                    case PrefillFailed():
                        asked.prefill_failed = said
                asked.changed.set()
            case _:
                pass

    async def _tokens(self, tokens: Tokens) -> None:
        asked = self.open.get(RequestRef(tokens.request, tokens.attempt))
        if asked is None:
            return
        asked.whole &= tokens.index == len(asked.ids)
        asked.ids.extend(tokens.ids)
        if tokens.reused_tokens is not None:
            asked.reused_tokens = tokens.reused_tokens
        asked.finish = tokens.finish
        ack = TokenAck(
            request=tokens.request,
            attempt=tokens.attempt,
            choice=0,
            index=len(asked.ids),
            finished=asked.ended,
        )
        inbox = self.node.subjects.inbox(Role.DECODE, asked.decode.node, "control")
        await self.node.bus.publish(inbox, ack)
        if asked.ended:
            self.open.pop(asked.ref)
        asked.changed.set()

    async def _list(self) -> None:
        while True:
            await self.node.clock.sleep(1.0)
            self._lists += 1
            owned = Owned(
                owner=self.node.ref, seq=self._lists, requests=tuple(self.open)
            )
            for role in (Role.PREFILL, Role.DECODE):
                for member in self.node.roster.live(role):
                    inbox = self.node.subjects.inbox(role, member.node, "control")
                    await self.node.bus.publish(inbox, owned)


@asynccontextmanager
async def pretended_gateway(
    cluster: Cluster, *nodes: str, name: str = "gateway-test"
) -> AsyncGenerator[PretendedGateway]:
    """A gateway on a real node in this process, once it knows that ``nodes`` are ready."""
    settings = RoleSettings(
        nats=cluster.nats.url,
        node=name,
        state_dir=cluster.state_dir,
        shm_dir=cluster.shm_dir(),
    )
    async with open_node(
        settings, (Role.GATEWAY,), clock=SystemClock(), registry=CollectorRegistry()
    ) as node:
        gateway = PretendedGateway(node)
        await gateway.start()
        for each in nodes:
            await gateway.member(each)
        yield gateway


@asynccontextmanager
async def lone_worker(
    folder: Path, settings: Mapping[str, Mapping[str, object]]
) -> AsyncGenerator[tuple[Cluster, PretendedGateway]]:
    """One worker of both roles with a store, ``WORKER``, and a gateway that knows it."""
    with Cluster(folder, prefill=0, decode=0, workers=1, settings=settings) as cluster:
        await asyncio.to_thread(cluster.wait_ready)
        async with pretended_gateway(cluster, WORKER) as gateway:
            yield cluster, gateway
