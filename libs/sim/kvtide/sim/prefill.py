"""A prefill worker in virtual time: its machine, and an engine that takes its time."""

from dataclasses import dataclass

from kvtide.bus import Gone, Hop, Incoming, Node, Restarted, RosterEvent
from kvtide.bus.messages import (
    Cancel,
    HandoverPull,
    HandoverTaken,
    Message,
    NodeState,
    Owned,
    PartSums,
    PrefillWork,
)
from kvtide.kv import KeySpace, Lease, NodeRef, RequestRef, Role
from kvtide.pool import PoolError, Put
from kvtide.prefill import events
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.queue import PrefillMachine
from kvtide.sim.engine import FACTS, LAYOUT, SimRun
from kvtide.sim.kernel import Kernel, Life
from kvtide.sim.pool import SimPool
from kvtide.sim.spaces import space_of

LIMITS = PrefillLimits(
    step_tokens=48, shared_step_tokens=32, initial_tokens_per_s=2000.0
)
TOKENS_PER_S = 1000.0
TICK_S = 0.05


@dataclass(slots=True)
class _Held:
    """What is kept for an open job."""

    work: PrefillWork
    space: KeySpace
    run: SimRun
    put: Put | None = None


class SimPrefill:
    """Drives a ``PrefillMachine`` as its shell does."""

    def __init__(self, kernel: Kernel, life: Life, node: Node, pool: SimPool) -> None:
        """Nothing is taken before ``start``."""
        self._kernel = kernel
        self._life = life
        self._node = node
        self._pool = pool
        self.machine = PrefillMachine(node.ref, LIMITS)
        self._held: dict[RequestRef, _Held] = {}
        self._aborted = False
        self._store: NodeRef | None = None

    @property
    def runs(self) -> int:
        """Runs that were not given back."""
        return sum(not held.run.closed for held in self._held.values())

    async def start(self) -> None:
        """Listen, and take work."""
        node = self._node
        node.on_fenced(self._fenced)
        node.on_member(self._member)
        await node.inbox(Role.PREFILL, Hop.WORK, self._heard)
        await node.inbox(Role.PREFILL, Hop.CONTROL, self._heard)
        node.models(FACTS)
        self._tell(events.ModelLoaded(FACTS.name, FACTS.max_tokens, FACTS.block_tokens))
        self._kernel.spawn(self._tick(), self._life)

    async def _tick(self) -> None:
        while True:
            store = self._pool.watch()
            if store != self._store:
                if self._store is not None:
                    self._tell(events.StoreAttached(attached=False))
                if store is not None:
                    self._tell(events.StoreAttached(attached=True))
                self._store = store
            ready = store is not None
            self._node.set_state(NodeState.READY if ready else NodeState.LOADING)
            self._tell(events.Tick())
            self._node.report(self.machine.load())
            await self._kernel.sleep(TICK_S, self._life)

    async def _heard(self, incoming: Incoming) -> Message | None:
        match incoming.message:
            case PrefillWork() as work:
                return self._tell(events.WorkArrived(work))
            case Cancel() as cancel:
                return self._tell(events.CancelArrived(cancel))
            case Owned() as owned:
                return self._tell(events.OwnedArrived(owned))
            case HandoverPull() as pull:
                return self._tell(events.PullArrived(pull))
            case HandoverTaken() as taken:
                return self._tell(events.TakenArrived(taken))
            case _:
                return None

    def _member(self, event: RosterEvent) -> None:
        if isinstance(event, Gone):
            self._tell(events.MemberGone(event.member.ref))
        elif isinstance(event, Restarted):
            self._tell(events.MemberGone(event.before.ref))

    def _fenced(self, me: NodeRef) -> None:
        for held in self._held.values():
            held.put = None
        self._tell(events.Fenced(me))

    # ---- what goes out

    def _tell(self, event: events.Event) -> Message | None:
        reply: Message | None = None
        for command in self.machine.handle(event, self._kernel.now_s):
            if isinstance(command, events.Reply):
                reply = command.message
            else:
                self._do(command)
        return reply

    def _do(self, command: events.Command) -> None:
        subjects, spawn, life = self._node.subjects, self._kernel.spawn, self._life
        match command:
            case events.ToDecode(decode, message):
                inbox = subjects.inbox(Role.DECODE, decode.node, Hop.HANDOVER)
                spawn(self._node.bus.publish(inbox, message), life)
            case events.ToGateway(gateway, message):
                inbox = subjects.inbox(Role.GATEWAY, gateway.node, Hop.TOKENS)
                spawn(self._node.bus.publish(inbox, message), life)
            case events.Abort():
                self._aborted = True
            case events.Release() | events.Free():
                self._end(command)
            case _:
                self._begin_operation(command)

    def _begin_operation(self, command: events.Command) -> None:
        spawn, life = self._kernel.spawn, self._life
        match command:
            case events.Open(work, ref, capacity):
                run = SimRun(capacity)
                self._held[ref] = _Held(work, space_of(work.tenant, work.salt), run)
            case events.Step():
                spawn(self._run_step(command), life)
            case events.Load():
                spawn(self._load(command), life)
            case events.Begin():
                spawn(self._begin(command), life)
            case events.Commit(ref):
                spawn(self._commit(ref), life)
            case _:
                raise AssertionError(command)

    def _end(self, command: events.Release | events.Free) -> None:
        held = self._held[command.ref]
        if isinstance(command, events.Free):
            held.run.close()
        elif held.put is not None:
            self._kernel.spawn(held.put.release(), self._life)
            held.put = None
        if held.run.closed and held.put is None:
            del self._held[command.ref]

    # ---- operations

    async def _load(self, load: events.Load) -> None:
        held, begin_s, blocks = self._held[load.ref], self._kernel.now_s, 0
        for block, copy in enumerate(load.copies, load.first):
            if not await self._pool.read_block(copy, held.space.tags, held.run, block):
                break
            blocks += 1
        ms = (self._kernel.now_s - begin_s) * 1000
        size = blocks * LAYOUT.slot_bytes
        self._tell(events.Loaded(load.ref, blocks, size, ms))

    async def _begin(self, begin: events.Begin) -> None:
        held, ref = self._held[begin.ref], begin.ref
        lease = Lease(ref.request, ref.attempt, self._node.ref)
        try:
            put = await self._pool.begin(lease, held.space.tags, begin.blocks)
        except PoolError:
            self._tell(events.SlotsGranted(ref, ()))
            return
        if lease.owner == self._node.ref:
            held.put = put
        else:
            await put.release()
        self._tell(events.SlotsGranted(ref, put.slots))

    async def _commit(self, ref: RequestRef) -> None:
        put = self._held[ref].put
        try:
            if put is not None:
                await put.commit()
        except PoolError:
            pass  # decode reads the parts all the same
        self._tell(events.Committed(ref))

    async def _run_step(self, step: events.Step) -> None:
        """Layer by layer, so that parts are written and told while it runs."""
        self._aborted = False
        tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
        seconds = tokens / TOKENS_PER_S
        for chunk in step.chunks:
            held = self._held[chunk.ref]
            held.run.compute(held.work.tokens[chunk.start : chunk.end], chunk.start)
        outcome, reason = events.StepOutcome.DONE, ""
        for layer in range(FACTS.layers):
            await self._kernel.sleep(seconds / FACTS.layers, self._life)
            if self._aborted:
                outcome = events.StepOutcome.ABORTED
                break
            try:
                self._write_layer(step, layer)
            except PoolError as error:
                outcome, reason = events.StepOutcome.FAILED, str(error)
                break
        ended = events.StepEnded(step.step, outcome, seconds * 1000, reason)
        self._node.count_step()
        self._tell(ended)

    def _write_layer(self, step: events.Step, layer: int) -> None:
        for chunk in step.chunks:
            held, written = self._held[chunk.ref], list[PartSums]()
            if held.put is None:
                continue
            for filled in chunk.filled:
                start = filled.block * LAYOUT.block_tokens
                end = start + filled.tokens
                k_xxh3, v_xxh3 = (
                    held.put.write_part(
                        filled.put, number, held.run.part(number, start, end)
                    )
                    for number in (2 * layer, 2 * layer + 1)
                )
                written.append(PartSums(filled.block, layer, k_xxh3, v_xxh3))
            if written:
                self._tell(events.PartsWritten(chunk.ref, tuple(written)))
