"""A decode worker in virtual time: its machine, and an engine that takes its time."""

from dataclasses import dataclass
from functools import partial

from kvtide.bus import BusError, Gone, Hop, Incoming, Node, Restarted, RosterEvent
from kvtide.bus.messages import (
    Ack,
    AnyMessage,
    Cancel,
    DecodeWork,
    HandoverPlan,
    HandoverPull,
    HandoverState,
    HandoverTaken,
    Message,
    NodeState,
    Owned,
    PartsReady,
    PrefillDone,
    PrefillFailed,
    PutBlock,
    TokenAck,
    TokenPull,
)
from kvtide.decode import events
from kvtide.decode.batcher import DecodeMachine
from kvtide.decode.events import LayerPart
from kvtide.decode.limits import DecodeLimits
from kvtide.kv import KeySpace, Lease, NodeRef, RequestRef, Role
from kvtide.pool import PoolError
from kvtide.sim.engine import FACTS, LAYOUT, SimRun
from kvtide.sim.kernel import Kernel, Life
from kvtide.sim.pool import SimPool
from kvtide.sim.spaces import space_of

LIMITS = DecodeLimits(batch=4, initial_step_ms=10.0)
CAPACITY_TOKENS = 640
STEP_S = 0.01
TOKENS_PER_S = 1000.0
TICK_S = 0.05
ASK_S = 1.0


@dataclass(slots=True)
class _Held:
    """What is kept for a sequence that has pages."""

    work: DecodeWork
    space: KeySpace
    run: SimRun


class SimDecode:
    """Drives a ``DecodeMachine`` as its shell does."""

    def __init__(self, kernel: Kernel, life: Life, node: Node, pool: SimPool) -> None:
        """Nothing is taken before ``start``."""
        self._kernel = kernel
        self._life = life
        self._node = node
        self._pool = pool
        self.machine = DecodeMachine(node.ref, LIMITS, _keys)
        self._held: dict[RequestRef, _Held] = {}
        self._store: NodeRef | None = None

    @property
    def runs(self) -> int:
        """Runs that were not given back."""
        return len(self._held)

    async def start(self) -> None:
        """Listen, and take work."""
        node = self._node
        node.on_fenced(lambda me: self._done(events.Fenced(me)))
        node.on_member(self._member)
        for hop in (Hop.WORK, Hop.CONTROL, Hop.HANDOVER):
            await node.inbox(Role.DECODE, hop, self._heard)
        node.models(FACTS)
        loaded = events.ModelLoaded(
            FACTS.name,
            FACTS.max_tokens,
            FACTS.block_tokens,
            FACTS.layers,
            FACTS.eos_token_ids,
            CAPACITY_TOKENS,
        )
        self._done(loaded)
        self._kernel.spawn(self._tick(), self._life)

    async def _tick(self) -> None:
        while True:
            store = self._pool.watch()
            if store != self._store:
                self._done(events.StoreAttached(attached=store is not None))
                self._store = store
            ready = store is not None
            self._node.set_state(NodeState.READY if ready else NodeState.LOADING)
            self._done(events.Tick())
            self._node.report(self.machine.load())
            await self._kernel.sleep(TICK_S, self._life)

    async def _heard(self, incoming: Incoming) -> Message | None:
        event = _event_of(incoming.message)
        return None if event is None else self._told(event)

    def _member(self, event: RosterEvent) -> None:
        if isinstance(event, Gone):
            self._done(events.MemberGone(event.member.ref))
        elif isinstance(event, Restarted):
            self._done(events.MemberGone(event.before.ref))

    # ---- what goes out

    def _done(self, event: events.Event) -> None:
        self._told(event)

    def _told(self, event: events.Event) -> Message | None:
        reply: Message | None = None
        for command in self.machine.handle(event, self._kernel.now_s):
            if isinstance(command, events.Reply):
                reply = command.message
            else:
                self._do(command)
        return reply

    def _do(self, command: events.Command) -> None:
        spawn = partial(self._kernel.spawn, life=self._life)
        match command:
            case events.ToGateway(gateway, message):
                inbox = self._node.subjects.inbox(
                    Role.GATEWAY, gateway.node, Hop.TOKENS
                )
                spawn(self._node.bus.publish(inbox, message))
            case events.AskHandover():
                spawn(self._ask(command))
            case events.TellTaken():
                spawn(self._tell_taken(command))
            case events.Step():
                spawn(self._run_step(command))
            case _:
                self._do_for_run(command)

    def _do_for_run(self, command: events.Command) -> None:
        spawn = partial(self._kernel.spawn, life=self._life)
        match command:
            case events.Open(work, ref, capacity):
                space = space_of(work.tenant, work.salt)
                self._held[ref] = _Held(work, space, SimRun(capacity))
            case events.ReadCopies():
                spawn(self._read_copies(self._held[command.ref], command))
            case events.ReadParts():
                spawn(self._read_parts(self._held[command.ref], command))
            case events.PutBlocks():
                spawn(self._put_blocks(self._held[command.ref], command))
            case events.Free(ref):
                self._held.pop(ref).run.close()
            case _:
                raise AssertionError(command)

    # ---- operations

    async def _ask(self, ask: events.AskHandover) -> None:
        inbox = self._node.subjects.inbox(Role.PREFILL, ask.prefill.node, Hop.CONTROL)
        pull = HandoverPull(request=ask.ref.request, attempt=ask.ref.attempt)
        try:
            answer = await self._node.bus.request(inbox, pull, timeout_s=ASK_S)
        except BusError:
            answer = None
        state = answer if isinstance(answer, HandoverState) else None
        self._done(events.HandoverAnswered(ask.ref, state))

    async def _tell_taken(self, taken: events.TellTaken) -> None:
        inbox = self._node.subjects.inbox(Role.PREFILL, taken.prefill.node, Hop.CONTROL)
        message = HandoverTaken(request=taken.ref.request, attempt=taken.ref.attempt)
        try:
            answer = await self._node.bus.request(inbox, message, timeout_s=ASK_S)
        except BusError:
            answer = None
        self._done(events.TakenAnswered(taken.ref, acked=isinstance(answer, Ack)))

    async def _read_copies(self, held: _Held, read: events.ReadCopies) -> None:
        good: list[int] = []
        missed: list[int] = []
        for copy in read.copies:
            there = await self._pool.read_block(
                copy.located, held.space.tags, held.run, copy.block
            )
            (good if there else missed).append(copy.block)
        self._done(events.CopiesRead(read.ref, tuple(good), tuple(missed)))

    async def _read_parts(self, held: _Held, read: events.ReadParts) -> None:
        good: list[LayerPart] = []
        missed: list[LayerPart] = []
        for part in read.parts:
            sums = part.sums
            start = sums.block * LAYOUT.block_tokens
            both = True
            for kind, xxh3 in enumerate((sums.k_xxh3, sums.v_xxh3)):
                number = 2 * sums.layer + kind
                into = partial(held.run.part, number, start, start + part.tokens)
                both &= await self._pool.read_part(part.slot, number, xxh3, into)
            (good if both else missed).append(LayerPart(sums.block, sums.layer))
        self._done(events.PartsRead(read.ref, tuple(good), tuple(missed)))

    async def _put_blocks(self, held: _Held, put: events.PutBlocks) -> None:
        size, ref = LAYOUT.block_tokens, put.ref
        lease = Lease(ref.request, ref.attempt, self._node.ref)
        wanted = [PutBlock(one.key, size) for one in put.blocks]
        try:
            granted = await self._pool.begin(lease, held.space.tags, wanted)
        except PoolError:
            self._done(events.BlocksPut(ref))
            return
        try:
            for index, one in enumerate(put.blocks):
                if not granted.writable(index):
                    continue
                start = one.block * size
                for number in range(LAYOUT.parts):
                    part = held.run.part(number, start, start + size)
                    granted.write_part(index, number, part)
            await granted.commit()
        except PoolError:
            pass  # it is not pooled, that is all
        await granted.release()
        self._done(events.BlocksPut(ref))

    async def _run_step(self, step: events.Step) -> None:
        tokens = sum(len(row.tokens) for row in step.rows)
        seconds = STEP_S + tokens / TOKENS_PER_S
        await self._kernel.sleep(seconds, self._life)
        sampled: list[events.Sampled] = []
        for row in step.rows:
            run = self._held[row.ref].run
            run.compute(row.tokens, row.start)
            if row.sampling is not None:
                token = run.draw(row.start + len(row.tokens), row.sampling, row.banned)
                sampled.append(events.Sampled(row.ref, token))
        self._node.count_step()
        outcome = events.StepOutcome.DONE
        ended = events.StepEnded(step.step, outcome, seconds * 1000, tuple(sampled))
        self._done(ended)


def _keys(work: DecodeWork) -> KeySpace:
    return space_of(work.tenant, work.salt)


def _event_of(message: AnyMessage) -> events.Event | None:
    event: events.Event | None = None
    match message:
        case DecodeWork():
            event = events.WorkArrived(message)
        case Cancel():
            event = events.CancelArrived(message)
        case Owned():
            event = events.OwnedArrived(message)
        case TokenAck():
            event = events.AckArrived(message)
        case TokenPull():
            event = events.PullArrived(message)
        case HandoverPlan() | PartsReady() | PrefillDone() | PrefillFailed():
            event = events.HandoverSaid(message)
        case _:
            pass
    return event
