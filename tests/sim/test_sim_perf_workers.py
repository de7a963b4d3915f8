"""The thin decode of ``sim.perf`` does what the production batcher does, step by step.

Both are driven in virtual time by the same arrivals, with engines that take the same
time for the same step, where nothing is preempted and nobody leaves early.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import DecodeLoad, DecodeWork, SamplingSpec, Tokens
from kvtide.decode import events
from kvtide.decode.batcher import DecodeMachine
from kvtide.decode.limits import DecodeLimits
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
from kvtide.policy import StepCurve
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.decoding import DecodeWorker
from kvtide.sim.perf.steps import Row

ME = NodeRef(NodeId("me"), 1)
GATEWAY = NodeRef(NodeId("gateway"), 1)
LONG_S = 1e6
# no sum of these is a whole millisecond, as all arrivals are: no ties but meant ones
CURVES = (
    StepCurve(20.3171, 0.04713, 0.000287),
    StepCurve(1.00173, 2.13719, 0.017113),
    StepCurve(7.77713, 0.0, 0.0),
)


def located(key: BlockKey, number: int) -> Located:
    slot = SlotRef(NodeId("store"), 1, Tier.DRAM, 0, number * 100, 100, 1)
    return Located(key, slot, number)


class Keys:
    """Of blocks that nobody looks for."""

    def key(self, parent: BlockKey | None, tokens: list[int]) -> BlockKey:
        del parent
        return BlockKey(bytes([tokens[0] % 256]) * 16)


@dataclass(frozen=True)
class Asked:
    """A request to decode: its KV is there ``made_ms`` after it came, but not before
    ``pull_ms`` after there was room for it. A prompt of one token has nothing to pull.
    """

    at_ms: int
    prompt: int
    output: int
    made_ms: int
    pull_ms: float

    def pulled_s(self, room_s: float) -> float:
        return max(room_s, (self.at_ms + self.made_ms) / 1000) + self.pull_ms / 1000


@dataclass
class Course:
    """What became of one. Steps are counted from 1."""

    room_s: float = -1.0
    first_step: int = 0
    first_s: float = -1.0
    last_step: int = 0
    last_s: float = -1.0
    tbt_ms: float = -1.0


@dataclass(frozen=True)
class Engine:
    """What both get."""

    curve: StepCurve
    batch: int
    capacity: int


@dataclass
class Courses:
    """All requests of a run, and the loads that were reported at set times."""

    by_number: defaultdict[int, Course] = field(
        default_factory=lambda: defaultdict(Course)
    )
    loads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    busy_ms: float = 0.0

    def probe(self, load: DecodeLoad) -> None:
        tokens = load.kv_tokens_used + load.kv_tokens_promised
        self.loads.append((load.waiting + load.running, tokens))


class Batcher:
    """The production machine, and a shell that takes the curve's time for a step."""

    def __init__(self, engine: Engine, kernel: Kernel) -> None:
        self.found = Courses()
        self._engine, self._kernel = engine, kernel
        limits = DecodeLimits(
            waiting=10**6,
            batch=engine.batch,
            growth_blocks=10**6,
            unacked_tokens=10**6,
        )
        self.machine = DecodeMachine(ME, limits, lambda _: Keys())
        self._asked: dict[RequestRef, Asked] = {}
        self._said_s: defaultdict[int, list[float]] = defaultdict(list)
        size = engine.capacity
        self._tell(events.ModelLoaded("m", 10**6, 1, 1, (), size))

    def ask(self, number: int, asked: Asked) -> None:
        keys = tuple(BlockKey(bytes([n]) * 16) for n in range(asked.prompt))
        work = DecodeWork(
            request=RequestId(str(number)),
            attempt=1,
            gateway=GATEWAY,
            tenant=TenantId("t"),
            salt="",
            model="m",
            tokens=(7,) * asked.prompt,
            prompt_tokens=asked.prompt,
            keys=keys,
            reuse=tuple(located(key, n) for n, key in enumerate(keys[:-1])),
            prefill=None,
            sampling=SamplingSpec(temperature=0),
            max_new_tokens=asked.output,
            deadline_ms=LONG_S * 1000,
            ignore_eos=True,
        )
        self._asked[RequestRef(work.request, 1)] = asked
        self._tell(events.WorkArrived(work))

    def _tell(self, event: events.Event) -> None:
        for command in self.machine.handle(event, self._kernel.now_s):
            match command:
                case events.Open(ref=ref):
                    self.found.by_number[_number(ref)].room_s = self._kernel.now_s
                case events.ReadCopies(ref, copies):
                    self._read(ref, tuple(copy.block for copy in copies))
                case events.Step():
                    self._step(command)
                case events.ToGateway(_, message):
                    assert isinstance(message, Tokens), message
                    times = self._said_s[int(message.request)]
                    times.append(self._kernel.now_s)
                case events.Free() | events.Reply():
                    pass
                case _:
                    raise AssertionError(command)

    def _read(self, ref: RequestRef, blocks: tuple[int, ...]) -> None:
        now_s = self._kernel.now_s
        delay_s = self._asked[ref].pulled_s(now_s) - now_s
        self._kernel.at(delay_s, lambda: self._tell(events.CopiesRead(ref, blocks, ())))

    def _step(self, step: events.Step) -> None:
        shape = step.shape
        assert shape.new == shape.rows
        ms = self._engine.curve.ms(shape.rows, shape.attended)
        self.found.busy_ms += ms
        for row in step.rows:
            course = self.found.by_number[_number(row.ref)]
            course.first_step = course.first_step or step.step
            course.last_step = step.step
        drawn = tuple(events.Sampled(row.ref, 7) for row in step.rows)
        ended = events.StepEnded(step.step, events.StepOutcome.DONE, ms, drawn)
        self._kernel.at(ms / 1000, lambda: self._tell(ended))

    def ended(self) -> Courses:
        for number, times_s in self._said_s.items():
            course = self.found.by_number[number]
            course.first_s, course.last_s = times_s[0], times_s[-1]
            gaps_ms = [(b - a) * 1000 for a, b in pairwise(times_s)]
            gaps_ms.sort(reverse=True)
            longest = gaps_ms[: -(-len(gaps_ms) // 10)]
            course.tbt_ms = sum(longest) / len(longest) if longest else 0.0
        return self.found


class Thin:
    """The drive of ``sim.perf``."""

    def __init__(self, engine: Engine, kernel: Kernel) -> None:
        self.found = Courses()
        self._kernel = kernel
        self.machine = DecodeWorker(
            kernel,
            engine.curve,
            batch=engine.batch,
            capacity_tokens=engine.capacity,
            first=self._first,
        )
        self._rows: dict[int, Row] = {}

    def ask(self, number: int, asked: Asked) -> None:
        row = Row(
            number, asked.prompt, asked.output, lambda ms: self._ended(number, ms)
        )
        self._rows[number] = row

        def room() -> None:
            now_s = self._kernel.now_s
            self.found.by_number[number].room_s = now_s
            if asked.prompt == 1:
                self.machine.join(row)
            else:
                delay_s = asked.pulled_s(now_s) - now_s
                self._kernel.at(delay_s, lambda: self.machine.join(row))

        self.machine.promise(number, asked.prompt + asked.output, room)

    def _first(self, number: int, at_s: float) -> None:
        self.found.by_number[number].first_s = at_s

    def _ended(self, number: int, tbt_ms: float) -> None:
        course, row = self.found.by_number[number], self._rows[number]
        course.first_step, course.last_step = row.first_step, row.last_step
        course.last_s, course.tbt_ms = self._kernel.now_s, tbt_ms

    def ended(self) -> Courses:
        self.found.busy_ms = self.machine.busy_s * 1000
        return self.found


def _number(ref: RequestRef) -> int:
    return int(ref.request)


def run(
    kind: Callable[[Engine, Kernel], Batcher | Thin],
    engine: Engine,
    asked: list[Asked],
) -> Courses:
    kernel = Kernel(0.0)
    drive = kind(engine, kernel)
    for number, each in enumerate(asked):
        kernel.at(each.at_ms / 1000, lambda n=number, a=each: drive.ask(n, a))
    for probe in range(0, max(each.at_ms for each in asked) + 200, 100):
        at_s = (probe + 0.37) / 1000
        kernel.at(at_s, lambda: drive.found.probe(drive.machine.load()))
    kernel.run(LONG_S)
    return drive.ended()


def asked_of(most: int, prompt: int, output: int) -> st.SearchStrategy[list[Asked]]:
    one = st.builds(
        Asked,
        at_ms=st.integers(0, 600),
        prompt=st.integers(1, prompt),
        output=st.integers(1, output),
        made_ms=st.integers(0, 300),
        pull_ms=st.integers(0, 60),
    )
    return st.lists(one, min_size=1, max_size=most).map(untied)


def untied(asked: list[Asked]) -> list[Asked]:
    """In order of arrival; no pull ends just when a step does, but by plan."""
    ordered = sorted(asked, key=lambda each: each.at_ms)
    return [
        replace(each, pull_ms=each.pull_ms + 0.00173 * (number + 1) ** 1.5)
        for number, each in enumerate(ordered)
    ]


def check_decode(engine: Engine, asked: list[Asked]) -> None:
    real, thin = run(Batcher, engine, asked), run(Thin, engine, asked)
    assert set(real.by_number) == set(range(len(asked)))
    for number, each in enumerate(asked):
        one, other = real.by_number[number], thin.by_number[number]
        assert (one.first_step, one.last_step) == (other.first_step, other.last_step)
        assert one.last_step - one.first_step == each.output - 1
        assert one.room_s == pytest.approx(other.room_s, rel=1e-9)
        assert one.first_s == pytest.approx(other.first_s, rel=1e-9)
        assert one.last_s == pytest.approx(other.last_s, rel=1e-9)
        assert one.tbt_ms == pytest.approx(other.tbt_ms, rel=1e-6)
    assert real.loads == thin.loads
    assert real.busy_ms == pytest.approx(thin.busy_ms, rel=1e-9)


def engines(least: int) -> st.SearchStrategy[Engine]:
    """Memory for at least the largest request, and for a few of them at most."""
    return st.builds(
        Engine,
        st.sampled_from(CURVES),
        st.integers(1, 6),
        st.integers(least, 4 * least),
    )


@given(engines(40), asked_of(8, 20, 20))
@settings(max_examples=50, deadline=None)
def test_a_batch_is_the_production_batchers(engine: Engine, asked: list[Asked]) -> None:
    check_decode(engine, asked)


@pytest.mark.full
@pytest.mark.timeout(900)
@given(engines(160), asked_of(30, 100, 60))
@settings(max_examples=500, deadline=None)
def test_a_batch_is_the_production_batchers_in_long_rounds(
    engine: Engine, asked: list[Asked]
) -> None:
    check_decode(engine, asked)
