"""A fake engine for ops/bench/overhead.py: tokens on time, from the cheapest process there is.

``python overhead_engine.py kvtide JSON`` is a prefill and decode worker on a real bus;
``python overhead_engine.py openai JSON`` a server of OpenAI's chat API. Both answer on
the same schedule: the first token ``first_ms`` after a request came, one more each
``step_ms``. A request for ``HOLD_TOKENS`` tokens gets one and then nothing.

With ``serial`` the fake worker prefills one request after the other and says so in its
load, as a real one does: it can take 1000 / ``first_ms`` requests a second.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from kvtide.bus import Hop, Incoming, Node, open_node
from kvtide.bus.messages import (
    Ack,
    Cancel,
    DecodeLoad,
    DecodeWork,
    Failure,
    FinishReason,
    Message,
    NodeState,
    PrefillDone,
    PrefillLoad,
    PrefillTimes,
    PrefillWork,
    PullState,
    SnapshotPage,
    SnapshotPull,
    StoreLoad,
    TokenPage,
    TokenPull,
    Tokens,
    WorkAccepted,
)
from kvtide.bus.outbox import Outbox
from kvtide.kv import ModelFacts, NodeRef, RequestRef, Role
from kvtide.runtime import SystemClock
from kvtide.runtime.settings import RoleSettings

HOLD_TOKENS = 77
WORD = 300
"""The token that every answer is made of."""


class Plan(msgspec.Struct, frozen=True):
    """What the parent process wants."""

    first_ms: float
    step_ms: float
    serial: bool = False
    nats: str = ""
    folder: str = ""
    vocab_size: int = 0
    port: int = 0


@dataclass(slots=True)
class Going:
    """One request."""

    gateway: NodeRef
    prompt: int = 0
    wanted: int = 0
    due_s: float = 0.0
    made: int = 0
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Alarms:
    """Calls at set times, late ones at once. A timer each: nothing polls."""

    clock: SystemClock

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        """Call then; in the loop."""
        wait_s = due_s - self.clock.monotonic()
        asyncio.get_running_loop().call_later(max(0.0, wait_s), call)


class FakeWorker:
    """Prefill and decode of one node; makes no KV."""

    def __init__(self, node: Node, plan: Plan) -> None:
        self._node = node
        self._plan = plan
        self._alarms = Alarms(SystemClock())
        self._outbox = Outbox(node.bus, limit=1 << 16)
        self._going: dict[RequestRef, Going] = {}
        self._free_s = 0.0

    async def start(self) -> None:
        """Listen, and say that it is ready."""
        await self._node.inbox(Role.STORE, Hop.QUERY, self._query)
        for role in (Role.PREFILL, Role.DECODE):
            await self._node.inbox(role, Hop.WORK, self._work)
            await self._node.inbox(role, Hop.CONTROL, self._control)
        facts = ModelFacts(
            name="fake",
            digest="f" * 16,
            layers=1,
            kv_heads=1,
            head_dim=2,
            kv_dtype="float32",
            vocab_size=self._plan.vocab_size,
            max_tokens=4096,
            eos_token_ids=(0,),
            numerics="n",
            block_tokens=64,
        )
        self._node.models(facts)
        self._report()
        self._node.tasks.spawn(self._outbox.run(), name="outbox")
        self._node.tasks.spawn(self._reports(), name="reports")
        self._node.set_state(NodeState.READY)

    async def _work(self, incoming: Incoming) -> Message:
        work = incoming.message
        if not isinstance(work, PrefillWork | DecodeWork):
            return Failure(code="unexpected", reason=type(work).__name__)
        ref = RequestRef(work.request, work.attempt)
        going = self._one(ref, work.gateway)
        if isinstance(work, DecodeWork):
            going.wanted = work.max_new_tokens
        if isinstance(work, PrefillWork) or work.prefill is None:
            self._prefill(ref, going, len(work.tokens))
        return WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=0)

    def _prefill(self, ref: RequestRef, going: Going, tokens: int) -> None:
        now_s = self._node.clock.monotonic()
        begin_s = max(now_s, self._free_s) if self._plan.serial else now_s
        self._free_s = begin_s + self._plan.first_ms / 1000
        going.prompt, going.due_s = tokens, self._free_s
        self._alarms.at(going.due_s, lambda: self._prefilled(ref, going))

    def _one(self, ref: RequestRef, gateway: NodeRef) -> Going:
        """The two halves of a request's work come in any order."""
        going = self._going.get(ref)
        if going is None:
            going = self._going[ref] = Going(gateway)
        return going

    def _prefilled(self, ref: RequestRef, going: Going) -> None:
        done = PrefillDone(
            request=ref.request,
            attempt=ref.attempt,
            prefill=self._node.ref,
            reused_tokens=0,
            computed_tokens=going.prompt,
            messages=1,
            times=PrefillTimes(queue_ms=0, load_ms=0, compute_ms=self._plan.first_ms),
        )
        self._say(going, done)
        self._step(ref, going)

    def _step(self, ref: RequestRef, going: Going) -> None:
        current = self._going.get(ref)
        if going.cancelled or current is None:
            return
        if current.wanted == 0:  # decode's work is still on its way
            self._alarms.at(
                self._node.clock.monotonic() + 0.001, lambda: self._step(ref, going)
            )
            return
        index = current.made
        current.made += 1
        is_last = current.made >= current.wanted
        self._say(
            current,
            Tokens(
                request=ref.request,
                attempt=ref.attempt,
                decode=self._node.ref,
                choice=0,
                index=index,
                ids=(WORD,),
                finish=FinishReason.LENGTH if is_last else None,
                reused_tokens=0 if index == 0 else None,
            ),
        )
        if is_last:
            self._going.pop(ref, None)
        elif current.wanted != HOLD_TOKENS:
            going.due_s += self._plan.step_ms / 1000
            self._alarms.at(going.due_s, lambda: self._step(ref, going))

    def _say(self, going: Going, message: Message) -> None:
        subject = self._node.subjects.inbox(
            Role.GATEWAY, going.gateway.node, Hop.TOKENS
        )
        self._outbox.post(subject, message)

    async def _control(self, incoming: Incoming) -> Message | None:
        match incoming.message:
            case Cancel() as cancel:
                ref = RequestRef(cancel.request, cancel.attempt)
                going = self._going.pop(ref, None)
                if going is not None:
                    going.cancelled = True
                return Ack()
            case TokenPull() as pull:
                going = self._going.get(RequestRef(pull.request, pull.attempt))
                made = going.made if going is not None else 0
                return TokenPage(
                    request=pull.request,
                    attempt=pull.attempt,
                    choice=0,
                    index=pull.index,
                    ids=(WORD,) * max(0, made - pull.index),
                    state=PullState.UNKNOWN if going is None else PullState.RUNNING,
                )
            case _:
                return None

    async def _query(self, incoming: Incoming) -> Message | None:
        """The store that a gateway wants to see, which has nothing."""
        if not isinstance(incoming.message, SnapshotPull):
            return None
        return SnapshotPage(store=self._node.ref, seq=0, located=(), next_key=None)

    async def _reports(self) -> None:
        while True:
            await self._node.clock.sleep(0.05)
            self._node.count_step()  # with work and no steps it is taken for hung
            self._report()

    def _report(self) -> None:
        waiting_s = max(0.0, self._free_s - self._node.clock.monotonic())
        queue_ms = waiting_s * 1000 if self._plan.serial else 0.0
        queued = int(queue_ms / self._plan.first_ms)
        rate = 256 / (self._plan.first_ms / 1000)
        self._node.report(
            StoreLoad(),
            PrefillLoad(
                queued=queued,
                queued_tokens=256 * queued,
                tokens_per_s=rate,
                queue_ms=queue_ms,
            ),
            DecodeLoad(
                running=min(len(self._going), 64),
                kv_tokens_capacity=10_000_000,
                step_ms=self._plan.step_ms,
            ),
        )


async def kvtide(plan: Plan) -> None:
    """Be a worker until killed."""
    folder = Path(plan.folder)
    settings = RoleSettings(
        nats=plan.nats, node="fake-0", state_dir=folder, shm_dir=folder
    )
    async with open_node(
        settings,
        (Role.STORE, Role.PREFILL, Role.DECODE),
        clock=SystemClock(),
        registry=CollectorRegistry(),
    ) as node:
        await FakeWorker(node, plan).start()
        await asyncio.Event().wait()


async def openai(plan: Plan) -> None:
    """Be a server of chat completions until killed."""
    clock = SystemClock()
    alarms = Alarms(clock)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(size))
                await answer(writer, int(asked["max_tokens"]), clock.monotonic())
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    async def answer(writer: asyncio.StreamWriter, count: int, came_s: float) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        due_s = came_s + plan.first_ms / 1000
        over = asyncio.Event()

        def step(index: int, at_s: float) -> None:
            writer.write(_chunk(_piece(" word", None)))
            if index + 1 < count and count != HOLD_TOKENS:
                later_s = at_s + plan.step_ms / 1000
                alarms.at(later_s, lambda: step(index + 1, later_s))
            elif count != HOLD_TOKENS:
                writer.write(_chunk(_piece("", "length")))
                writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                over.set()

        alarms.at(due_s, lambda: step(0, due_s))
        await over.wait()

    server = await asyncio.start_server(serve, "127.0.0.1", plan.port, backlog=2048)
    async with server:
        await asyncio.Event().wait()


def _piece(text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    event = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "fake",
        "choices": [choice],
    }
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


if __name__ == "__main__":
    wanted = msgspec.json.decode(sys.argv[2], type=Plan)
    uvloop.run({"kvtide": kvtide, "openai": openai}[sys.argv[1]](wanted))
