"""A pretended shell for the prefill machine: carries commands out, checks each."""

from collections import Counter

from kvtide.bus.messages import (
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


class Shell:
    """Carries out commands as a test says, and checks that each one is allowed."""

    def __init__(self, limits: PrefillLimits = LIMITS) -> None:
        self.machine = PrefillMachine(ME, limits)
        self.now_s = 0.0
        self.opened: set[RequestRef] = set()
        self.leased: set[RequestRef] = set()
        self.under_way: dict[RequestRef, events.Command] = {}
        self.step: events.Step | None = None
        self.replies: list[object] = []
        self.said: list[object] = []
        self.ends: Counter[RequestRef] = Counter()
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
            case events.Open(_, ref, capacity):
                assert ref not in self.opened
                assert capacity % BLOCK == 0
                self.opened.add(ref)
            case events.Load(ref) | events.Begin(ref) | events.Commit(ref):
                assert ref in self.opened
                assert ref not in self.under_way
                if isinstance(command, events.Begin):
                    assert ref not in self.leased
                    self.leased.add(ref)
                self.under_way[ref] = command
            case _:
                self._do_held(command)

    def _do_held(self, command: events.Command) -> None:
        match command:
            case events.Step(_, chunks):
                assert self.step is None
                assert {chunk.ref for chunk in chunks} <= self.opened
                assert not {chunk.ref for chunk in chunks} & set(self.under_way)
                self.step = command
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

    def uses(self, ref: RequestRef) -> bool:
        stepping = self.step is not None and ref in {
            chunk.ref for chunk in self.step.chunks
        }
        return stepping or ref in self.under_way

    def finish(self, ref: RequestRef, *, short: int = 0, there: int = 0) -> None:
        """End the operation of ``ref``: ``short`` blocks less than was wanted.

        The first ``there`` that slots were asked for are in the pool already.
        """
        match self.under_way.pop(ref):
            case events.Load(_, copies):
                self.tell(events.Loaded(ref, max(0, len(copies) - short), 1000, 2.0))
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
        self, outcome: events.StepOutcome = events.StepOutcome.DONE
    ) -> events.Step:
        step = self.step
        assert step is not None
        for layer in range(LAYERS):
            for chunk in step.chunks:
                if chunk.filled:
                    parts = tuple(
                        PartSums(filled.block, layer, 1, 2) for filled in chunk.filled
                    )
                    self.tell(events.PartsWritten(chunk.ref, parts))
        self.step = None
        self.tell(events.StepEnded(step.step, outcome, 10.0))
        return step

    def run(self) -> None:
        """Carry everything out until nothing is under way."""
        for _ in range(1000):
            if self.under_way:
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
