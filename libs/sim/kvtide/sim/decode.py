"""A decode worker in virtual time: its machine, and an engine that takes its time."""

from dataclasses import dataclass
from functools import partial

from kvtide.bus import BusError, Hop, Node
from kvtide.bus.messages import (
    Ack,
    AnyMessage,
    DecodeWork,
    HandoverPull,
    HandoverState,
    HandoverTaken,
    PutBlock,
)
from kvtide.decode import events
from kvtide.decode.batcher import DecodeMachine
from kvtide.decode.events import BlockCopy, LayerPart
from kvtide.decode.limits import DecodeLimits
from kvtide.decode.messages import HOPS, event_of
from kvtide.kv import KeySpace, Lease, RequestRef, Role
from kvtide.pool import PoolError
from kvtide.sim.engine import FACTS, LAYOUT, SimRun
from kvtide.sim.kernel import Kernel, Life
from kvtide.sim.pool import SimPool
from kvtide.sim.spaces import space_of
from kvtide.sim.worker import SimWorker

LIMITS = DecodeLimits(batch=4, initial_step_ms=30.0)
CAPACITY_TOKENS = 640
STEP_S = 0.03
TOKENS_PER_S = 1000.0
ASK_S = 1.0


@dataclass(slots=True)
class _Held:
    """What is kept for a sequence that has pages."""

    work: DecodeWork
    space: KeySpace
    run: SimRun


class SimDecode(SimWorker[events.Event, events.Command]):
    """Drives a ``DecodeMachine`` as its shell does."""

    limits = LIMITS
    capacity_tokens = CAPACITY_TOKENS
    step_s = STEP_S

    def __init__(self, kernel: Kernel, life: Life, node: Node, pool: SimPool) -> None:
        """Nothing is taken before ``start``."""
        self.machine = DecodeMachine(node.ref, self.limits, _keys)
        super().__init__(kernel, life, node, pool, Role.DECODE, HOPS, self.machine)
        self._held: dict[RequestRef, _Held] = {}

    @property
    def runs(self) -> int:
        """Runs that were not given back."""
        return len(self._held)

    def _loaded(self) -> events.Event:
        return events.ModelLoaded(
            FACTS.name,
            FACTS.max_tokens,
            FACTS.block_tokens,
            FACTS.layers,
            FACTS.eos_token_ids,
            self.capacity_tokens,
        )

    def _event_of(self, message: AnyMessage) -> events.Event | None:
        return event_of(message)

    # ---- what goes out

    def _do(self, command: events.Command) -> None:
        match command:
            case events.ToGateway():
                pass
            case events.AskHandover():
                self._spawn(self._ask, command, command)
            case events.TellTaken():
                self._spawn(self._tell_taken, command, command)
            case events.Step():
                self._spawn(self._run_step, command, command)
            case _:
                self._do_for_run(command)

    def _do_for_run(self, command: events.Command) -> None:
        match command:
            case events.Open(work, ref, capacity):
                space = space_of(work.tenant, work.salt)
                self._held[ref] = _Held(work, space, SimRun(capacity))
            case events.FindCopies(ref):
                self._spawn(self._find_copies, command, self._held[ref], command)
            case events.ReadCopies(ref):
                self._spawn(self._read_copies, command, self._held[ref], command)
            case events.ReadParts(ref):
                self._spawn(self._read_parts, command, self._held[ref], command)
            case events.PutBlocks(ref):
                self._spawn(self._put_blocks, command, self._held[ref], command)
            case events.Free(ref):
                self._held.pop(ref).run.close()
            case _:
                raise AssertionError(command)

    # ---- operations

    async def _ask(self, ask: events.AskHandover) -> events.Event:
        inbox = self._node.subjects.inbox(Role.PREFILL, ask.prefill.node, Hop.CONTROL)
        pull = HandoverPull(request=ask.ref.request, attempt=ask.ref.attempt)
        try:
            answer = await self._node.bus.request(inbox, pull, timeout_s=ASK_S)
        except BusError:
            answer = None
        state = answer if isinstance(answer, HandoverState) else None
        return events.HandoverAnswered(ask.ref, state)

    async def _tell_taken(self, taken: events.TellTaken) -> events.Event:
        inbox = self._node.subjects.inbox(Role.PREFILL, taken.prefill.node, Hop.CONTROL)
        message = HandoverTaken(request=taken.ref.request, attempt=taken.ref.attempt)
        try:
            answer = await self._node.bus.request(inbox, message, timeout_s=ASK_S)
        except BusError:
            answer = None
        return events.TakenAnswered(taken.ref, acked=isinstance(answer, Ack))

    async def _find_copies(self, held: _Held, find: events.FindCopies) -> events.Event:
        lease = Lease(find.ref.request, find.ref.attempt, self._node.ref)
        wanted = [PutBlock(one.key, LAYOUT.block_tokens) for one in find.blocks]
        try:
            put = await self._pool.begin(lease, held.space.tags, wanted)
        except PoolError:
            return events.CopiesFound(find.ref, ())
        copies = tuple(
            BlockCopy(one.block, slot.existing)
            for one, slot in zip(find.blocks, put.slots, strict=True)
            if slot.existing is not None
        )
        await put.release()
        return events.CopiesFound(find.ref, copies)

    async def _read_copies(self, held: _Held, read: events.ReadCopies) -> events.Event:
        good: list[int] = []
        missed: list[int] = []
        for copy in read.copies:
            there = await self._pool.read_block(
                copy.located, held.space.tags, held.run, copy.block
            )
            (good if there else missed).append(copy.block)
        return events.CopiesRead(read.ref, tuple(good), tuple(missed))

    async def _read_parts(self, held: _Held, read: events.ReadParts) -> events.Event:
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
        return events.PartsRead(read.ref, tuple(good), tuple(missed))

    async def _put_blocks(self, held: _Held, put: events.PutBlocks) -> events.Event:
        size, ref = LAYOUT.block_tokens, put.ref
        lease = Lease(ref.request, ref.attempt, self._node.ref)
        wanted = [PutBlock(one.key, size) for one in put.blocks]
        try:
            granted = await self._pool.begin(lease, held.space.tags, wanted)
        except PoolError:
            return events.BlocksPut(ref)
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
        return events.BlocksPut(ref)

    async def _run_step(self, step: events.Step) -> events.Event:
        tokens = sum(len(row.tokens) for row in step.rows)
        seconds = self.step_s + tokens / TOKENS_PER_S
        await self._kernel.work(seconds, self._life)
        sampled: list[events.Sampled] = []
        for row in step.rows:
            run = self._held[row.ref].run
            run.compute(row.tokens, row.start)
            if row.sampling is not None:
                token = run.draw(row.start + len(row.tokens), row.sampling, row.banned)
                sampled.append(events.Sampled(row.ref, token))
        self._node.count_step()
        outcome = events.StepOutcome.DONE
        return events.StepEnded(step.step, outcome, seconds * 1000, tuple(sampled))


def _keys(work: DecodeWork) -> KeySpace:
    return space_of(work.tenant, work.salt)
