"""A gateway on its real HTTP port, among scripted workers on a bus in memory.

The workers keep the protocol (accept, tokens with finish, pulls, acked cancels), so a
test only says what they answer and when.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import openai
from prometheus_client import CollectorRegistry
from tests.integration.gateway_nodes import MeasuredNetwork, open_memory_node
from tests.integration.gateway_script import (
    FACTS,
    MODEL,
    TOKENIZER,
    Script,
    logprobs_of,
)
from tests.unit.gateway_models import CHATML, SEEING, write_model

from kvtide.bus import Hop, Incoming, MemoryHub, Node
from kvtide.bus.messages import (
    Ack,
    Admit,
    Cancel,
    CandidateEstimate,
    DecodeWork,
    Failure,
    FinishReason,
    Message,
    NodeState,
    Owned,
    Placed,
    PrefillDone,
    PrefillTimes,
    PrefillWork,
    PullState,
    RejectCode,
    Rejected,
    RequestEnded,
    TokenAck,
    TokenPage,
    TokenPull,
    Tokens,
    WorkAccepted,
    WorkRefused,
)
from kvtide.gateway.app import serve_on
from kvtide.gateway.settings import GatewaySettings
from kvtide.kv import NodeRef, RequestId, Role
from kvtide.runtime import SystemClock, TaskScope
from kvtide.transfer import MemoryFabric


@dataclass
class Generating:
    """One attempt at the decode worker."""

    work: DecodeWork
    ids: list[int]
    done: int
    task: asyncio.Task[None] | None = None
    finish: FinishReason | None = None
    failed: str = ""


class Cluster:
    """The workers' side of the bus, and what it has seen."""

    def __init__(self, hub: MemoryHub, clock: SystemClock, script: Script) -> None:
        self.hub = hub
        self.fabric = MemoryFabric(clock)
        self.clock = clock
        self.script = script
        self.nodes: dict[Role, Node] = {}
        self.admits: list[Admit] = []
        self.prefills: list[PrefillWork] = []
        self.decodes: list[DecodeWork] = []
        self.cancels: list[tuple[Role, Cancel]] = []
        self.acks: list[TokenAck] = []
        self.owned: list[Owned] = []
        self.ended: list[RequestEnded] = []
        self.generating: dict[tuple[RequestId, int], Generating] = {}
        self.steps = 0

    def ref(self, role: Role) -> NodeRef:
        return self.nodes[role].ref

    async def open(self, stack: AsyncExitStack) -> None:
        for role in (Role.CONDUCTOR, Role.STORE, Role.PREFILL, Role.DECODE):
            await self.add(role, stack)

    async def add(self, role: Role, stack: AsyncExitStack) -> Node:
        node = await stack.enter_async_context(
            open_memory_node(
                self.hub,
                self.clock,
                role,
                fabric=self.fabric,
                dead_after_s=self.script.dead_after_s,
            )
        )
        await self.serve(node, role)
        return node

    async def serve(self, node: Node, role: Role) -> None:
        """Have ``node`` play ``role`` from now on."""
        self.nodes[role] = node
        if role in (Role.PREFILL, Role.DECODE):
            script = self.script
            node.models(
                replace(FACTS, max_tokens=script.context, pictures=script.pictures)
            )
        for hop, handler in (
            (Hop.ADMIT, self.on_admit),
            (Hop.WORK, self.on_work),
            (Hop.CONTROL, self.on_control),
        ):
            if hop in _HOPS[role]:
                await node.inbox(role, hop, handler)
        if role is Role.CONDUCTOR:
            await node.bus.subscribe(node.subjects.all_ended(), self.on_ended)
        node.set_state(NodeState.READY)

    async def on_ended(self, incoming: Incoming) -> None:
        assert isinstance(incoming.message, RequestEnded)
        self.ended.append(incoming.message)

    async def on_admit(self, incoming: Incoming) -> Message | None:
        message = incoming.message
        assert isinstance(message, Admit)
        self.admits.append(message)
        named = f".{self.script.silent_node}." in incoming.subject
        if self.script.conductor_silent or named:
            return None
        if self.script.reject is not None:
            return Rejected(
                request=message.request,
                attempt=message.attempt,
                code=self.script.reject,
                reason="scripted",
                retry_after_ms=1500,
            )
        if self.ref(Role.DECODE).node in message.excluded:
            return Rejected(
                request=message.request,
                attempt=message.attempt,
                code=RejectCode.NO_WORKERS,
                reason="all are excluded",
            )
        return self.place(message)

    def place(self, message: Admit) -> Placed:
        prefill, decode = self.ref(Role.PREFILL), self.ref(Role.DECODE)
        chosen = CandidateEstimate(
            prefill=prefill.node,
            decode=decode.node,
            hit_tokens=0,
            queue_ms=0,
            transfer_ms=0,
            prefill_ms=0,
            ttft_ms=0,
            tbt_ms=0,
        )
        return Placed(
            request=message.request,
            attempt=message.attempt,
            prefill=prefill,
            decode=decode,
            reuse=(),
            chosen=chosen,
            reason="",
        )

    async def on_work(self, incoming: Incoming) -> Message:
        work = incoming.message
        if isinstance(work, DecodeWork):
            self.decodes.append(work)
            if self.script.refuse is not None:
                return WorkRefused(
                    request=work.request,
                    attempt=work.attempt,
                    code=self.script.refuse,
                    reason="scripted",
                )
            self.generate(work)
        elif isinstance(work, PrefillWork):
            self.prefills.append(work)
            node = self.nodes[Role.PREFILL]
            node.tasks.spawn(self.prefill(work), name="prefill")
        else:
            return Failure(code="unexpected", reason=type(work).__name__)
        return WorkAccepted(request=work.request, attempt=work.attempt, start_ms=0)

    async def prefill(self, work: PrefillWork) -> None:
        await self.clock.sleep(self.script.prefill_s)
        done = PrefillDone(
            request=work.request,
            attempt=work.attempt,
            prefill=self.ref(Role.PREFILL),
            reused_tokens=self.script.reused,
            computed_tokens=len(work.tokens) - self.script.reused,
            messages=1,
            times=PrefillTimes(queue_ms=0, load_ms=0, compute_ms=0),
        )
        await self.to_gateway(Role.PREFILL, work.gateway, done)

    async def to_gateway(self, role: Role, gateway: NodeRef, message: Message) -> None:
        node = self.nodes[role]
        subject = node.subjects.inbox(Role.GATEWAY, gateway.node, Hop.TOKENS)
        await node.bus.publish(subject, message)

    def generate(self, work: DecodeWork) -> None:
        ids = self.script.ids
        if ids is None:
            ids = TOKENIZER.encode(self.script.answer, add_special_tokens=False).ids
        start = len(work.tokens) - work.prompt_tokens
        generating = Generating(work, ids[: work.max_new_tokens], start)
        self.generating[work.request, work.attempt] = generating
        tasks = self.nodes[Role.DECODE].tasks
        generating.task = tasks.spawn(self.decode(generating), name="decode")

    async def decode(self, generating: Generating) -> None:
        work = generating.work
        while True:
            await self.clock.sleep(self.script.step_s)
            if generating.done == self.script.hold_at:
                await self.script.go.wait()
            self.steps += 1
            index = generating.done
            ids = generating.ids[index : index + self.script.burst]
            generating.done = index + len(ids)
            if not ids:
                generating.finish = FinishReason.STOP
            elif generating.done == work.max_new_tokens:
                generating.finish = FinishReason.LENGTH
            message = Tokens(
                request=work.request,
                attempt=work.attempt,
                decode=self.ref(Role.DECODE),
                choice=0,
                index=index,
                ids=tuple(ids),
                finish=generating.finish,
                reused_tokens=self.script.reused if index == 0 else None,
                prompt_tokens=self.script.prompt_tokens if index == 0 else None,
                logprobs=logprobs_of(work, index, ids),
            )
            lost = self.script.lose_finish and generating.finish is not None
            if not lost and not self.script.drop_tokens:
                await self.to_gateway(Role.DECODE, work.gateway, message)
            if generating.finish is not None:
                return

    async def on_control(self, incoming: Incoming) -> Message | None:
        message = incoming.message
        role = next(r for r in _HOPS if f".{r}." in incoming.subject)
        match message:
            case Cancel():
                self.cancels.append((role, message))
                self.stop(message.request, message.attempt)
                return Ack()
            case TokenPull():
                return self.page(message)
            case TokenAck():
                self.acks.append(message)
            case Owned():
                self.owned.append(message)
            case _:
                pass
        return None

    def stop(self, request: RequestId, attempt: int) -> None:
        for (r, a), generating in self.generating.items():
            if r == request and a <= attempt and generating.task is not None:
                generating.task.cancel()

    def page(self, pull: TokenPull) -> TokenPage:
        generating = self.generating.get((pull.request, pull.attempt))
        state = PullState.UNKNOWN
        ids: tuple[int, ...] = ()
        finish = None
        if generating is not None:
            finish = generating.finish
            state = PullState.RUNNING if finish is None else PullState.FINISHED
            ids = tuple(generating.ids[pull.index : generating.done])
        return TokenPage(
            request=pull.request,
            attempt=pull.attempt,
            choice=0,
            index=pull.index,
            ids=ids,
            state=state,
            finish=finish,
            logprobs=logprobs_of(generating.work, pull.index, ids)
            if generating
            else (),
        )

    @property
    def running(self) -> int:
        """Attempts that decode still works on."""
        return sum(
            g.task is not None and not g.task.done() for g in self.generating.values()
        )

    async def until(self, condition: Callable[[], bool], timeout_s: float = 40) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.clock.sleep(0.005)


_HOPS = {
    Role.CONDUCTOR: (Hop.ADMIT,),
    Role.STORE: (),
    Role.PREFILL: (Hop.WORK, Hop.CONTROL),
    Role.DECODE: (Hop.WORK, Hop.CONTROL),
}


def _seen_by_waiter(error: BaseException) -> None:
    """The test awaits the gateway's task and gets its error there."""


@dataclass
class Running:
    """A gateway that serves, and its cluster."""

    url: str
    node: Node
    cluster: Cluster
    script: Script
    stop: asyncio.Event
    served: asyncio.Task[None]
    registry: CollectorRegistry
    settings: GatewaySettings
    network: MeasuredNetwork

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


def openai_client(running: Running) -> openai.AsyncOpenAI:
    """The official client, which does not try again by itself; the caller closes it."""
    url = f"{running.url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


@asynccontextmanager
async def running_gateway(
    folder: Path,
    *,
    workers: bool = True,
    script: Script | None = None,
    **changes: object,
) -> AsyncGenerator[Running]:
    """A gateway and its workers until the block ends."""
    script = script or Script()
    template = SEEING if script.pictures else CHATML
    write_model(folder / MODEL, TOKENIZER, template=template)
    settings = GatewaySettings.model_validate(
        {
            "model": folder / MODEL,
            "node": "gateway-1",
            "drain_s": 0.2,
            "state_dir": folder,
            **changes,
        }
    )
    clock, registry = SystemClock(), CollectorRegistry()
    network = MeasuredNetwork()
    hub = MemoryHub(clock, network)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        cluster = Cluster(hub, clock, script)
        if workers:
            await cluster.open(stack)
        node = await stack.enter_async_context(
            open_memory_node(
                hub,
                clock,
                Role.GATEWAY,
                fabric=cluster.fabric,
                dead_after_s=script.dead_after_s,
            )
        )
        scope = await stack.enter_async_context(TaskScope(on_error=_seen_by_waiter))
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = serve_on(node, settings, stop=stop, registry=registry, ready=ready)
        served = scope.spawn(serving, name="gateway")
        await asyncio.wait((served, ready), return_when=asyncio.FIRST_COMPLETED)
        if served.done():
            served.result()
        running = Running(
            ready.result(),
            node,
            cluster,
            script,
            stop,
            served,
            registry,
            settings,
            network,
        )
        if workers:
            roster = node.roster
            await cluster.until(
                lambda: all(any(m.ready for m in roster.live(r)) for r in _HOPS)
            )
        yield running
        stop.set()
        async with asyncio.timeout(40):
            await served
    await hub.close()
