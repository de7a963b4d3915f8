"""A pretended shell for the prefill machine: carries commands out, checks each."""

from collections import Counter, defaultdict

from kvtide.bus.messages import (
    BlocksMade,
    BlocksMaking,
    PartSums,
    PrefillDone,
    PrefillFailed,
    PrefillWork,
    PutSlot,
)
from kvtide.kv import (
    BlockKey,
    Located,
    NodeId,
    NodeRef,
    RequestId,
    RequestRef,
    SlotRef,
    TenantId,
    Tier,
)
from kvtide.prefill import events
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.queue import PrefillMachine

ME = NodeRef(NodeId("p"), 1)
GATEWAY = NodeRef(NodeId("g"), 1)
OTHER = NodeRef(NodeId("o"), 1)
DECODE = NodeRef(NodeId("d"), 1)
BLOCK = 16
LAYERS = 2
LIMITS = PrefillLimits(
    queued=4, jobs=8, step_tokens=64, shared_step_tokens=24, batch_tokens=20
)


def slot(number: int) -> SlotRef:
    return SlotRef(NodeId("s"), 1, Tier.DRAM, 0, number * 100, 100, 1)


def work(
    name: str, tokens: int, *, attempt: int = 1, reuse: int = 0, prefix: int = 0
) -> PrefillWork:
    """Prompts of one ``prefix`` begin with the same blocks."""
    numbers = range(prefix, prefix + tokens // BLOCK)
    keys = tuple(BlockKey(bytes([i]) * 16) for i in numbers)
    return PrefillWork(
        request=RequestId(name),
        attempt=attempt,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        salt="",
        model="m",
        tokens=tuple(range(tokens)),
        keys=keys,
        reuse=tuple(Located(key, slot(i), i) for i, key in enumerate(keys[:reuse])),
        decode=DECODE,
        deadline_ms=60_000,
    )


def making_elsewhere(
    keys: tuple[BlockKey, ...],
    left_ms: float = 50.0,
    *,
    by: NodeRef = OTHER,
    waits: bool = False,
) -> BlocksMaking:
    """Another worker says what it does for its request ``other``."""
    return BlocksMaking(
        prefill=by,
        request=RequestId("other"),
        attempt=1,
        keys=keys,
        left_ms=left_ms,
        waits=waits,
    )


def made_elsewhere(copies: tuple[Located, ...] = (), *, ended: bool) -> BlocksMade:
    """What came of it."""
    return BlocksMade(
        prefill=OTHER,
        request=RequestId("other"),
        attempt=1,
        located=copies,
        ended=ended,
    )


class Shell:
    """Carries out commands as a test says, and checks that each one is allowed."""

    def __init__(self, limits: PrefillLimits = LIMITS, me: NodeRef = ME) -> None:
        self.machine = PrefillMachine(me, limits)
        self.now_s = 0.0
        self.opened: set[RequestRef] = set()
        self.leased: set[RequestRef] = set()
        self.under_way: dict[RequestRef, events.Command] = {}
        self.loads: list[events.Load] = []
        self.kv: defaultdict[RequestRef, set[int]] = defaultdict(set)
        self.in_vain = False
        self.step: events.Step | None = None
        self.replies: list[object] = []
        self.said: list[object] = []
        self.ends: Counter[RequestRef] = Counter()
        self.to_peers: list[BlocksMaking | BlocksMade] = []
        self.told: set[RequestRef] = set()
        self.tell(events.ModelLoaded("m", 1000, BLOCK))
        self.tell(events.StoreAttached(attached=True))

    def tell(self, event: events.Event) -> None:
        for command in self.machine.handle(event, self.now_s):
            self._do(command)

    def _do(self, command: events.Command) -> None:
        match command:
            case events.Reply(message):
                self.replies.append(message)
            case events.ToDecode(_, message):
                self.said.append(message)
            case events.ToGateway(_, message):
                assert isinstance(message, PrefillDone | PrefillFailed)
                self.ends[RequestRef(message.request, message.attempt)] += 1
            case events.ToPeers(message):
                assert isinstance(message, BlocksMaking | BlocksMade)
                self._said_to_peers(message)
            case events.Open(_, ref, capacity):
                assert ref not in self.opened
                assert capacity % BLOCK == 0
                self.opened.add(ref)
                self.kv[ref] = set()
            case events.Load(ref):
                assert ref in self.opened
                assert command.copies
                self.loads.append(command)
            case events.Begin(ref) | events.Commit(ref):
                assert ref in self.opened
                assert ref not in self.under_way
                if isinstance(command, events.Begin):
                    assert ref not in self.leased
                    self.leased.add(ref)
                self.under_way[ref] = command
            case _:
                self._do_held(command)

    def _said_to_peers(self, said: BlocksMaking | BlocksMade) -> None:
        self.to_peers.append(said)
        ref = RequestRef(said.request, said.attempt)
        if isinstance(said, BlocksMaking):
            self.told.add(ref)
        else:
            assert ref in self.told, "nobody knows of it"
            if said.ended:
                self.told.remove(ref)

    def _do_held(self, command: events.Command) -> None:
        match command:
            case events.Step(_, chunks):
                assert self.step is None
                assert {chunk.ref for chunk in chunks} <= self.opened
                for chunk in chunks:
                    begun = self.under_way.get(chunk.ref)
                    assert begun is None or isinstance(begun, events.Commit)
                    self._check_past(chunk, len(chunks))
                self.step = command
                self.in_vain = False
            case events.Abort(number):
                assert self.step is not None
                assert self.step.step == number
            case events.Release(ref):
                assert not self.uses(ref)
                self.leased.remove(ref)
            case events.Free(ref):
                assert not self.uses(ref)
                self.opened.remove(ref)
            case _:
                raise AssertionError(command)

    def _check_past(self, chunk: events.ChunkSpec, chunks: int) -> None:
        """What a chunk attends to is there, or a load that is under way brings it."""
        loads = [load for load in self.loads if load.ref == chunk.ref]
        coming = {
            token for load in loads for token in _tokens(load.first, len(load.copies))
        }
        assert chunks == 1 or not loads, "others would wait for a load"
        assert set(range(chunk.start)) <= self.kv[chunk.ref] | coming

    def uses(self, ref: RequestRef) -> bool:
        stepping = self.step is not None and ref in {
            chunk.ref for chunk in self.step.chunks
        }
        loading = any(load.ref == ref for load in self.loads)
        return stepping or loading or ref in self.under_way

    def check(self, *, short: int = 0) -> None:
        """Say of the oldest load that its copies are there, ``short`` less than wanted."""
        load = self.loads[0]
        there = max(0, len(load.copies) - short)
        self.tell(events.Checked(load.ref, load.first, there))

    def end_load(self, *, short: int = 0, ms: float = 2.0) -> None:
        """End the oldest load, with ``short`` blocks less than wanted."""
        load = self.loads.pop(0)
        blocks = max(0, len(load.copies) - short)
        self.kv[load.ref].update(_tokens(load.first, blocks))
        stepping = self.step.chunks if self.step is not None else ()
        if blocks < len(load.copies) and load.ref in {one.ref for one in stepping}:
            self.in_vain = True
        whole = blocks == len(load.copies)
        size = blocks * 100
        self.tell(events.Loaded(load.ref, blocks, size, ms, load.first, whole))

    def commit(self, ref: RequestRef, stored: tuple[Located, ...]) -> None:
        """End the commit of ``ref``: these are new in the pool."""
        assert isinstance(self.under_way.pop(ref), events.Commit)
        self.tell(events.Committed(ref, stored))

    def finish(self, ref: RequestRef, *, short: int = 0, there: int = 0) -> None:
        """End the operation of ``ref``: ``short`` blocks less than was wanted.

        The first ``there`` that slots were asked for are in the pool already.
        """
        if ref not in self.under_way:
            assert self.loads[0].ref == ref
            self.end_load(short=short)
            return
        match self.under_way.pop(ref):
            case events.Begin(_, blocks):
                slots = [PutSlot(slot(i)) for i in range(len(blocks))]
                for i, block in enumerate(blocks[:there]):
                    if block.key is not None:
                        copy = Located(block.key, slot(70 + i), i)
                        slots[i] = PutSlot(None, copy)
                kept = max(0, len(slots) - short)
                none = [PutSlot(None)] * (len(slots) - kept)
                self.tell(events.SlotsGranted(ref, (*slots[:kept], *none)))
            case events.Commit():
                self.tell(events.Committed(ref))
            case _:
                raise AssertionError

    def run_step(
        self, outcome: events.StepOutcome = events.StepOutcome.DONE, ms: float = 10.0
    ) -> events.Step:
        step = self.step
        assert step is not None
        refs = {chunk.ref for chunk in step.chunks}
        while outcome is events.StepOutcome.DONE and any(
            load.ref in refs for load in self.loads
        ):
            self.end_load()  # the step waits for it
        if self.in_vain and outcome is events.StepOutcome.DONE:
            outcome = events.StepOutcome.ABORTED
        for layer in range(LAYERS):
            for chunk in step.chunks:
                if chunk.filled:
                    parts = tuple(
                        PartSums(filled.block, layer, 1, 2) for filled in chunk.filled
                    )
                    self.tell(events.PartsWritten(chunk.ref, parts))
        self.step = None
        if outcome is events.StepOutcome.DONE:
            for chunk in step.chunks:
                assert set(range(chunk.start)) <= self.kv[chunk.ref]
                self.kv[chunk.ref].update(range(chunk.start, chunk.end))
        self.tell(events.StepEnded(step.step, outcome, ms))
        return step

    def run(self) -> None:
        """Carry everything out until nothing is under way."""
        for _ in range(1000):
            if self.loads:
                self.end_load()
            elif self.under_way:
                self.finish(next(iter(self.under_way)))
            elif self.step is not None:
                self.run_step()
            else:
                return
        raise AssertionError("it never ends")

    def of(self, kind: type) -> list[object]:
        return [message for message in self.said if isinstance(message, kind)]


def ref(name: str, attempt: int = 1) -> RequestRef:
    return RequestRef(RequestId(name), attempt)


def _tokens(first: int, blocks: int) -> range:
    return range(first * BLOCK, (first + blocks) * BLOCK)
