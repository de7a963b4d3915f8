"""The thin prefill of ``sim.perf`` computes what the production queue computes, and when.

Both are driven in virtual time by the same arrivals, with an engine that takes the same
time for the same prompt, loads that take the same time, and a store that answers at once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import PrefillDone, PrefillWork, PutSlot, WorkAccepted
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
from kvtide.policy import PrefillCurve
from kvtide.prefill import events
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.queue import PrefillMachine
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.prefilling import Job, PrefillWorker

ME = NodeRef(NodeId("me"), 1)
GATEWAY = NodeRef(NodeId("gateway"), 1)
DECODE = NodeRef(NodeId("decode"), 1)
BLOCK = 16
LAYERS = 4
LONG_S = 1e6
WHOLE = 10**9
CURVES = (PrefillCurve(3.1717, 1.00713, 0.00317), PrefillCurve(0.0, 0.50171, 0.0))


@dataclass(frozen=True)
class Asked:
    """A prompt: its full blocks, of which ``chosen`` are elsewhere, and some more tokens.

    Whatever is loaded of it takes ``load_ms``.
    """

    at_ms: int
    blocks: tuple[int, ...]
    more: int
    chosen: int
    load_ms: float

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.more


@dataclass(frozen=True)
class Computed:
    """A prompt that was computed, in the order of the beginning."""

    number: int
    reused_tokens: int
    began_s: float
    ended_s: float


def located(key: BlockKey) -> Located:
    return Located(key, SlotRef(NodeId("store"), 1, Tier.DRAM, 0, 0, 100, 1), 1)


def key_of(block: int) -> BlockKey:
    return BlockKey(block.to_bytes(16, "big"))


class Queue:
    """The production machine, and a shell that takes the curve's time for a step."""

    step_tokens = WHOLE

    def __init__(self, curve: PrefillCurve, ahead: int, kernel: Kernel) -> None:
        self._curve, self._kernel = curve, kernel
        limits = PrefillLimits(
            queued=10**6,
            queued_tokens=10**9,
            jobs=10**6,
            step_tokens=self.step_tokens,
            step_ms=1e30,
            batch_tokens=0,  # of its own
            prepare_ahead=ahead,
            initial_tokens_per_s=1e-6,  # whose blocks are waited for as long as it takes
        )
        self._machine = PrefillMachine(ME, limits)
        self._asked: dict[RequestRef, Asked] = {}
        self._pool: dict[BlockKey, Located] = {}
        self._loaded_s: dict[RequestRef, float] = {}
        self._began: dict[RequestRef, float] = {}
        self._ended: dict[RequestRef, tuple[PrefillDone, float]] = {}
        self._events = deque[events.Event]()
        self._tell(events.ModelLoaded("m", 10**6, BLOCK))
        self._tell(events.StoreAttached(attached=True))

    def ask(self, number: int, asked: Asked) -> None:
        keys = tuple(map(key_of, asked.blocks))
        work = PrefillWork(
            request=RequestId(str(number)),
            attempt=1,
            gateway=GATEWAY,
            tenant=TenantId("t"),
            salt="",
            model="m",
            tokens=(7,) * (asked.tokens + 1),
            keys=(*keys, BlockKey(b"last block's key")),
            reuse=tuple(map(located, keys[: asked.chosen])),
            decode=DECODE,
            deadline_ms=1e30,
        )
        self._asked[RequestRef(work.request, 1)] = asked
        self._tell(events.WorkArrived(work))

    def _tell(self, event: events.Event) -> None:
        """With all that answers at once."""
        self._events.append(event)
        while self._events:
            happened = self._events.popleft()
            for command in self._machine.handle(happened, self._kernel.now_s):
                self._do(command)

    def _do(self, command: events.Command) -> None:
        match command:
            case events.Load():
                self._load(command)
            case events.Begin(ref, blocks):
                copies = [self._pool.get(each.key or BlockKey(b"")) for each in blocks]
                slots = [
                    PutSlot(located(key_of(0)).slot if copy is None else None, copy)
                    for copy in copies
                ]
                self._events.append(events.SlotsGranted(ref, tuple(slots)))
            case events.Commit(ref):
                keys = map(key_of, self._asked[ref].blocks)
                new = {key: located(key) for key in keys if key not in self._pool}
                self._pool.update(new)
                self._events.append(events.Committed(ref, tuple(new.values())))
            case events.Step():
                self._step(command)
            case events.ToDecode(_, message) if isinstance(message, PrefillDone):
                ref = RequestRef(message.request, message.attempt)
                self._ended[ref] = message, self._kernel.now_s
            case events.Reply(message):
                assert isinstance(message, WorkAccepted), message
            case events.ToDecode() | events.ToGateway() | events.ToPeers():
                pass
            case events.Open() | events.Free():
                pass
            case _:
                raise AssertionError(command)

    def _load(self, load: events.Load) -> None:
        delay_s = self._asked[load.ref].load_ms / 1000
        self._loaded_s[load.ref] = self._kernel.now_s + delay_s
        count = len(load.copies)
        self._events.append(events.Checked(load.ref, load.first, count))
        ended = events.Loaded(load.ref, count, count * 100, 0.0, load.first)
        self._kernel.at(delay_s, lambda: self._tell(ended))

    def _step(self, step: events.Step) -> None:
        """Layer by layer: the last one's compute can't begin before its load's end."""
        (chunk,) = step.chunks
        now_s = self._kernel.now_s
        self._began.setdefault(chunk.ref, now_s)
        seconds = self._curve.ms(chunk.end - chunk.start, chunk.start) / 1000
        loaded_s = self._loaded_s.get(chunk.ref, now_s)
        end_s = max(now_s + seconds, loaded_s + seconds / LAYERS)
        ended = events.StepEnded(step.step, events.StepOutcome.DONE, 0.0)
        self._kernel.at(end_s - now_s, lambda: self._tell(ended))

    def computed(self) -> list[Computed]:
        return [
            Computed(int(ref.request), done.reused_tokens, began_s, ended_s)
            for ref, began_s in self._began.items()
            for done, ended_s in [self._ended[ref]]
        ]


class Chunked(Queue):
    """It computes prompts piece by piece."""

    step_tokens = 2 * BLOCK


class Thin:
    """The drive of ``sim.perf``."""

    def __init__(self, curve: PrefillCurve, ahead: int, kernel: Kernel) -> None:
        self._kernel = kernel
        self._pool = set[int]()
        self._asked: dict[int, Asked] = {}
        self._began: dict[int, Job] = {}
        self._ended: dict[int, float] = {}
        self._worker = PrefillWorker(
            kernel,
            curve,
            layers=LAYERS,
            prepare_ahead=ahead,
            block_tokens=BLOCK,
            there=self._pool.__contains__,
        )

    def ask(self, number: int, asked: Asked) -> None:
        self._asked[number] = asked
        self._worker.take(
            Job(
                number,
                asked.tokens,
                asked.blocks,
                asked.chosen,
                load=self._load,
                computing=lambda job: self._began.update({job.number: job}),
                done=self._done,
            )
        )

    def _load(self, job: Job) -> None:
        blocks = job.chosen
        while blocks < len(job.blocks) and job.blocks[blocks] in self._pool:
            blocks += 1
        job.reused_tokens = blocks * BLOCK
        if not blocks:
            self._worker.loaded(job)
            return
        delay_s = self._asked[job.number].load_ms / 1000
        self._kernel.at(delay_s, lambda: self._worker.loaded(job))

    def _done(self, job: Job) -> None:
        self._ended[job.number] = self._kernel.now_s
        self._pool.update(job.blocks)

    def computed(self) -> list[Computed]:
        return [
            Computed(number, job.reused_tokens, job.began_s, self._ended[number])
            for number, job in self._began.items()
        ]


def run(
    kind: Callable[[PrefillCurve, int, Kernel], Queue | Thin],
    curve: PrefillCurve,
    ahead: int,
    asked: list[Asked],
) -> list[Computed]:
    kernel = Kernel(0.0)
    drive = kind(curve, ahead, kernel)
    for number, each in enumerate(asked):
        kernel.at(each.at_ms / 1000, lambda n=number, a=each: drive.ask(n, a))
    kernel.run(LONG_S)
    return drive.computed()


@st.composite
def prompts(draw: st.DrawFn, most: int, span_ms: int) -> list[Asked]:
    """Some begin alike: turns of a few conversations, and branches of them."""
    count = draw(st.integers(1, most))
    times = sorted(draw(st.integers(0, span_ms)) for _ in range(count))
    asked: list[Asked] = []
    for number, at_ms in enumerate(times):
        family, alike = draw(st.integers(0, 2)), draw(st.integers(0, 6))
        own = draw(st.integers(0, 4))
        blocks = [1000 * family + depth for depth in range(alike)]
        blocks += [10_000 + 100 * number + depth for depth in range(own)]
        asked.append(
            Asked(
                at_ms,
                tuple(blocks),
                draw(st.integers(1, BLOCK - 1)),
                draw(st.integers(0, alike)),
                # no load ends just when a step does
                draw(st.integers(0, 200)) + 0.00173 * (number + 1) ** 1.5,
            )
        )
    return asked


def check(
    curve: PrefillCurve, ahead: int, asked: list[Asked], kind: type[Queue] = Queue
) -> None:
    real, thin = run(kind, curve, ahead, asked), run(Thin, curve, ahead, asked)
    assert len(real) == len(asked)
    assert [one.number for one in real] == [one.number for one in thin]
    for one, other in zip(real, thin, strict=True):
        assert one.reused_tokens == other.reused_tokens
        assert one.began_s == pytest.approx(other.began_s, rel=1e-9)
        assert one.ended_s == pytest.approx(other.ended_s, rel=1e-9)


@given(st.sampled_from(CURVES), st.integers(1, 3), prompts(8, 300))
@settings(max_examples=80, deadline=None)
def test_a_queue_is_the_production_queue(
    curve: PrefillCurve, ahead: int, asked: list[Asked]
) -> None:
    check(curve, ahead, asked)


@given(st.integers(1, 3), prompts(6, 300))
@settings(max_examples=30, deadline=None)
def test_chunks_of_prompts_that_load_nothing_take_as_long_as_the_whole(
    ahead: int, asked: list[Asked]
) -> None:
    apart = [
        Asked(each.at_ms, tuple(range(1000 * n, 1000 * n + len(each.blocks))), 3, 0, 0)
        for n, each in enumerate(asked)
    ]
    check(PrefillCurve(0.0, 1.00713, 0.00317), ahead, apart, Chunked)


def test_between_two_chunks_who_comes_first_and_has_loaded_goes_on() -> None:
    """The one thing that chunks change in the order: the thin drive has no chunks."""
    first, second = Asked(0, (1, 2), 5, 2, 60.1), Asked(1, tuple(range(5, 15)), 3, 0, 0)
    # the first is alone when it comes, so the engine is kept busy before
    asked = [Asked(0, (90, 91), 3, 0, 0), first, second]
    curve = PrefillCurve(0.0, 1.00713, 0.0)
    begins = [
        {one.number: one.began_s for one in run(kind, curve, 2, asked)}
        for kind in (Queue, Thin, Chunked)
    ]
    assert begins[0] == pytest.approx(begins[1])
    ends = {one.number: one.ended_s for one in run(Thin, curve, 2, asked)}
    assert begins[1][1] == pytest.approx(ends[2])
    assert begins[2][2] < begins[2][1] < ends[2]


@pytest.mark.full
@pytest.mark.timeout(900)
@given(st.sampled_from(CURVES), st.integers(1, 3), prompts(30, 2000))
@settings(max_examples=1000, deadline=None)
def test_a_queue_is_the_production_queue_in_long_rounds(
    curve: PrefillCurve, ahead: int, asked: list[Asked]
) -> None:
    check(curve, ahead, asked)
