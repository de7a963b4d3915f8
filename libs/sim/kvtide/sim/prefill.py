"""A prefill worker in virtual time: its machine, and an engine that takes its time."""

from dataclasses import dataclass, field

from kvtide.bus import Hop, Node
from kvtide.bus.messages import AnyMessage, PartSums, PrefillWork
from kvtide.kv import KeySpace, Lease, NodeRef, RequestRef, Role
from kvtide.pool import PoolError, Put
from kvtide.prefill import events
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.messages import HOPS, event_of
from kvtide.prefill.queue import PrefillMachine
from kvtide.sim.engine import FACTS, LAYOUT, SimRun
from kvtide.sim.kernel import Kernel, Life, Promise
from kvtide.sim.pool import SimPool
from kvtide.sim.spaces import space_of
from kvtide.sim.worker import SimWorker

LIMITS = PrefillLimits(
    step_tokens=48, shared_step_tokens=32, initial_tokens_per_s=2000.0
)
TOKENS_PER_S = 1000.0


@dataclass(slots=True)
class _Held:
    """What is kept for an open job."""

    work: PrefillWork
    space: KeySpace
    run: SimRun
    put: Put | None = None
    loads: dict[int, Promise[bool]] = field(default_factory=dict[int, Promise[bool]])
    written: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])


class SimPrefill(SimWorker[events.Event, events.Command]):
    """Drives a ``PrefillMachine`` as its shell does."""

    def __init__(self, kernel: Kernel, life: Life, node: Node, pool: SimPool) -> None:
        """Nothing is taken before ``start``."""
        self.machine = PrefillMachine(node.ref, LIMITS)
        super().__init__(kernel, life, node, pool, Role.PREFILL, HOPS, self.machine)
        self._held: dict[RequestRef, _Held] = {}
        self._aborted = False

    @property
    def runs(self) -> int:
        """Runs that were not given back."""
        return sum(not held.run.closed for held in self._held.values())

    def _loaded(self) -> events.Event:
        return events.ModelLoaded(FACTS.name, FACTS.max_tokens, FACTS.block_tokens)

    def _event_of(self, message: AnyMessage) -> events.Event | None:
        return event_of(message)

    def _fenced(self, me: NodeRef) -> None:
        for held in self._held.values():
            held.put = None
        super()._fenced(me)

    # ---- what goes out

    def _do(self, command: events.Command) -> None:
        match command:
            case events.ToDecode(decode, message):
                self._to(Role.DECODE, decode, Hop.HANDOVER, message)
            case events.ToGateway():
                pass
            case events.Abort():
                self._aborted = True
            case events.Release() | events.Free():
                self._end(command)
            case _:
                self._begin_operation(command)

    def _begin_operation(self, command: events.Command) -> None:
        match command:
            case events.Open(work, ref, capacity):
                run = SimRun(capacity)
                self._held[ref] = _Held(work, space_of(work.tenant, work.salt), run)
            case events.Step():
                self._spawn(self._run_step, command, command)
            case events.Load(ref, _, first):
                self._held[ref].loads[first] = Promise(self._kernel)
                self._spawn(self._load, command, command)
            case events.Begin():
                self._spawn(self._begin, command, command)
            case events.Commit(ref):
                self._spawn(self._commit, command, ref)
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

    async def _load(self, load: events.Load) -> events.Event:
        held, begin_s, blocks = self._held[load.ref], self._kernel.now_s, 0
        self._tell(events.Checked(load.ref, load.first, len(load.copies)))
        for block, copy in enumerate(load.copies, load.first):
            if not await self._pool.read_block(copy, held.space.tags, held.run, block):
                break
            blocks += 1
        held.loads[load.first].set(blocks == len(load.copies))
        del held.loads[load.first]
        ms = (self._kernel.now_s - begin_s) * 1000
        size = blocks * LAYOUT.slot_bytes
        return events.Loaded(load.ref, blocks, size, ms, load.first)

    async def _begin(self, begin: events.Begin) -> events.Event:
        held, ref = self._held[begin.ref], begin.ref
        lease = Lease(ref.request, ref.attempt, self._node.ref)
        try:
            put = await self._pool.begin(lease, held.space.tags, begin.blocks)
        except PoolError:
            return events.SlotsGranted(ref, ())
        if lease.owner == self._node.ref:
            held.put = put
        else:
            await put.release()
        return events.SlotsGranted(ref, put.slots)

    async def _commit(self, ref: RequestRef) -> events.Event:
        put = self._held[ref].put
        try:
            if put is not None:
                await put.commit()
        except PoolError:
            pass  # decode reads the parts all the same
        return events.Committed(ref)

    async def _run_step(self, step: events.Step) -> events.Event:
        """Layer by layer, so that parts are written and told while it runs."""
        self._aborted = False
        tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
        seconds = tokens / TOKENS_PER_S
        # the hash of a position goes through all layers: the whole load is waited for
        loads = [
            load for one in step.chunks for load in self._held[one.ref].loads.values()
        ]
        whole = [await load for load in loads]
        outcome, reason = events.StepOutcome.DONE, ""
        if not all(whole):
            return events.StepEnded(step.step, events.StepOutcome.ABORTED, 0.0)
        for chunk in step.chunks:
            held = self._held[chunk.ref]
            held.run.compute(held.work.tokens[chunk.start : chunk.end], chunk.start)
        for layer in range(FACTS.layers):
            await self._kernel.work(seconds / FACTS.layers, self._life)
            if self._aborted:
                outcome = events.StepOutcome.ABORTED
                break
            try:
                self._write_layer(step, layer)
            except PoolError as error:
                outcome, reason = events.StepOutcome.FAILED, str(error)
                break
        self._node.count_step()
        return events.StepEnded(step.step, outcome, seconds * 1000, reason)

    def _write_layer(self, step: events.Step, layer: int) -> None:
        for chunk in step.chunks:
            held, written = self._held[chunk.ref], list[PartSums]()
            if held.put is None:
                continue
            for filled in chunk.filled:
                if (filled.block, layer) in held.written:
                    continue
                held.written.add((filled.block, layer))
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
