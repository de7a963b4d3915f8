"""Which rail gets which request: fast ones more, failing ones none, none lost."""

from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtide.transfer.schedule import (
    BACKGROUND_DEPTH,
    DEPTH,
    LONGEST_PAUSE_S,
    Rail,
    Schedule,
)

MIB = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    nbytes: int = MIB
    urgency: int = 0
    location: str = ""
    least_tier: int = 0


known = partial(Rail, measured=True)


def drive(schedule: Schedule[Load], speeds: list[float], count: int) -> list[int]:
    """Move ``count`` MiB with rails of these true speeds; what each moved."""
    now_s = 0.0
    for _ in range(count):
        schedule.put(Load())
    free_s = [0.0] * len(speeds)
    ends: list[tuple[float, int, Load]] = []
    moved = [0] * len(speeds)
    while True:
        for load, rail in schedule.assign(now_s):
            free_s[rail] = max(free_s[rail], now_s) + load.nbytes / speeds[rail]
            ends.append((free_s[rail], rail, load))
        if not ends:
            return moved
        ends.sort(key=lambda end: end[:2])
        now_s, rail, load = ends.pop(0)
        schedule.finished(rail, load.nbytes, now_s)
        moved[rail] += 1


def test_equal_rails_share() -> None:
    moved = drive(Schedule([Rail("a"), Rail("b")]), [1e9, 1e9], 400)
    assert sum(moved) == 400
    assert min(moved) > 180


def test_a_slow_rail_gets_less() -> None:
    schedule = Schedule[Load]([Rail("a"), Rail("b")])
    moved = drive(schedule, [1e9, 1e8], 400)
    assert sum(moved) == 400
    # it is noticed, not only waited for
    fast, slow = schedule.rails
    assert fast.bandwidth_bytes_s > 5 * slow.bandwidth_bytes_s
    # a tenth as fast: an eleventh is ideal
    assert 20 < moved[1] < 60


def test_a_penalty_counts_where_the_memory_lies() -> None:
    rails = [known("a", penalties={"cpu:1": 3.0}), known("b", penalties={"cpu:0": 3.0})]
    schedule = Schedule[Load](rails)
    for location in ("cpu:0", "cpu:1", "cpu:0", "cpu:1"):
        schedule.put(Load(location=location))
    assert [rail for _, rail in schedule.assign(0)] == [0, 1, 0, 1]


def test_a_way_that_is_gone_gets_nothing_and_one_that_comes_does() -> None:
    schedule = Schedule[Load]([known("a"), known("b")])
    schedule.put(Load())
    assert [rail for _, rail in schedule.assign(0)] == [0]
    assert schedule.remove("a") == 0
    assert schedule.remove("a") is None
    for _ in range(3):
        schedule.put(Load())
    assert [rail for _, rail in schedule.assign(0)] == [1, 1, 1]
    # what is on it still ends; until then its place is not given away
    assert schedule.add(known("a")) == 2
    assert schedule.remove("a") == 2
    schedule.returned(0, MIB)
    assert schedule.add(known("a")) == 0
    schedule.put(Load())
    assert [rail for _, rail in schedule.assign(0)] == [0]


def test_without_any_way_requests_wait() -> None:
    schedule = Schedule[Load]([known("a")])
    schedule.remove("a")
    schedule.put(Load())
    assert schedule.assign(0) == []
    assert schedule.wake_s(0) is None
    schedule.add(Rail("c"))
    assert [rail for _, rail in schedule.assign(0)] == [1]


def test_what_does_not_fit_goes_by_the_next_tier() -> None:
    schedule = Schedule[Load]([known("rdma", most_bytes=MIB), known("tcp", tier=1)])
    for nbytes in (MIB, MIB + 1):
        schedule.put(Load(nbytes))
    assert [rail for _, rail in schedule.assign(0)] == [0, 1]


def test_a_lower_tier_only_helps_out() -> None:
    schedule = Schedule[Load]([known("rdma"), known("tcp", tier=1)])
    for _ in range(3):
        schedule.put(Load())
    assert [rail for _, rail in schedule.assign(0)] == [0, 0, 0]
    schedule.failed(0, MIB, 0)
    schedule.put(Load())
    assert [rail for _, rail in schedule.assign(0.01)] == [1]
    schedule.put(Load())
    assert [rail for _, rail in schedule.assign(0.06)] == [0]


def test_pauses_grow_and_end() -> None:
    schedule = Schedule[Load]([Rail("a")])
    now_s, pauses = 0.0, list[float]()
    for _ in range(12):
        schedule.put(Load())
        assert len(schedule.assign(now_s)) == 1
        schedule.failed(0, MIB, now_s)
        schedule.put(Load())
        assert schedule.assign(now_s) == []
        wake_s = schedule.wake_s(now_s)
        assert wake_s is not None
        pauses.append(wake_s - now_s)
        now_s = wake_s
        (taken,) = schedule.assign(now_s)
        schedule.returned(taken[1], MIB)
    assert pauses[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    schedule.put(Load())
    assert len(schedule.assign(now_s)) == 1
    schedule.finished(0, MIB, now_s + 1)
    assert schedule.rails[0].failures_in_a_row == 0


def test_what_was_in_flight_together_is_one_failure() -> None:
    schedule = Schedule[Load]([known("a")])
    for _ in range(DEPTH):
        schedule.put(Load())
    schedule.assign(0)
    for _ in range(DEPTH):
        schedule.failed(0, MIB, 1.0)
    assert schedule.rails[0].failures_in_a_row == 1
    assert schedule.rails[0].paused_until_s == pytest.approx(1.05)


def test_foreground_goes_first_and_background_leaves_room() -> None:
    schedule = Schedule[Load]([known("a")])
    background = [Load(urgency=1) for _ in range(5)]
    for load in background:
        schedule.put(load)
    assert len(schedule.assign(0)) == BACKGROUND_DEPTH
    urgent = Load()
    schedule.put(urgent)
    assert [load for load, _ in schedule.assign(0)] == [urgent]


def test_a_slow_rail_is_tried_again_after_a_while() -> None:
    schedule = Schedule[Load]([known("a"), known("b", bandwidth_bytes_s=1e6)])
    for _ in range(2):
        schedule.put(Load())
    assert [rail for _, rail in schedule.assign(0)] == [0, 0]
    for _ in range(2):
        schedule.put(Load())
    assert [rail for _, rail in schedule.assign(100)] == [1, 0]


def test_a_rail_starts_with_one_request() -> None:
    schedule = Schedule[Load]([Rail("a")])
    for _ in range(3):
        schedule.put(Load())
    assert len(schedule.assign(0)) == 1
    schedule.finished(0, MIB, 0.01)
    assert schedule.rails[0].bandwidth_bytes_s == pytest.approx(100 * MIB)
    assert len(schedule.assign(0.01)) == 2


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes: no request is lost, doubled or stuck, no rail overfull."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule[Load]([Rail("a"), Rail("b"), Rail("c", tier=1)])
        self.now_s = 0.0
        self.waiting: set[Load] = set()
        self.flying: list[tuple[Load, int]] = []

    @rule(nbytes=st.integers(0, 10 * MIB), urgency=st.integers(0, 1))
    def put(self, nbytes: int, urgency: int) -> None:
        load = Load(nbytes, urgency)
        self.waiting.add(load)
        self.schedule.put(load)

    @rule()
    def assign(self) -> None:
        for load, rail in self.schedule.assign(self.now_s):
            self.waiting.remove(load)
            self.flying.append((load, rail))
            assert self.schedule.rails[rail].paused_until_s <= self.now_s

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), end=st.sampled_from(["finished", "failed", "returned"]))
    def end(self, data: st.DataObject, end: str) -> None:
        at = data.draw(st.integers(0, len(self.flying) - 1))
        load, rail = self.flying.pop(at)
        if end == "finished":
            self.schedule.finished(rail, load.nbytes, self.now_s)
        elif end == "failed":
            self.schedule.failed(rail, load.nbytes, self.now_s)
        else:
            self.schedule.returned(rail, load.nbytes)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.schedule) == len(self.waiting)
        for index, rail in enumerate(self.schedule.rails):
            mine = [load for load, at in self.flying if at == index]
            assert rail.in_flight == len(mine) <= DEPTH
            assert rail.in_flight_bytes == sum(load.nbytes for load in mine)

    @invariant()
    def nothing_is_stuck(self) -> None:
        """What waits is assigned now, at a pause's end, or when something ends."""
        if self.waiting and not self.flying:
            wake_s = self.schedule.wake_s(self.now_s)
            paused = all(r.paused_until_s > self.now_s for r in self.schedule.rails)
            assert wake_s is not None or not paused


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(deadline=None, max_examples=50)
