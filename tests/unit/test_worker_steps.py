"""What steps cost: the fit finds what it was shown, and is never negative."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import Bound
from kvtide.worker.pace import Pace
from kvtide.worker.steps import Busy, StepCost, StepShape

NOTHING = StepShape.of([])
SPANS = st.tuples(st.integers(0, 4000), st.integers(1, 2000)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)


def test_a_shape_counts_pairs_of_attention() -> None:
    assert StepShape.of([(0, 3)]) == StepShape(1, 3, 6.0)  # 1 + 2 + 3
    assert StepShape.of([(4, 5), (9, 10)]) == StepShape(2, 2, 15.0)
    assert StepShape.of([(0, 3)]).with_shape(StepShape.of([(4, 5)])) == StepShape(
        2, 4, 11.0
    )


@pytest.mark.parametrize(
    ("fixed", "token", "pair"), [(40, 4, 0.0005), (0, 2.5, 0.0), (60, 0.1, 0.01)]
)
@pytest.mark.parametrize("seed", range(5))
def test_the_fit_finds_the_cost_that_made_the_steps(
    fixed: float, token: float, pair: float, seed: int
) -> None:
    rng = random.Random(seed)  # noqa: S311 - which steps, not a secret
    cost = StepCost(0.0, 1.0)

    def step() -> tuple[StepShape, float]:
        start, tokens = rng.randrange(3000), rng.choice([1, 1, 16, 64, 256, 1024])
        shape = StepShape.of([(start, start + tokens)] * rng.choice([1, 4]))
        return shape, fixed + token * shape.new + pair * shape.attended

    for _ in range(100):
        shape, ms = step()
        cost.add(shape, ms * rng.uniform(0.9, 1.1))
    for _ in range(10):
        shape, ms = step()
        assert cost.ms(shape) == pytest.approx(ms, rel=0.25)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SPANS, st.floats(0.01, 1e5)), max_size=40))
def test_whatever_was_measured_costs_are_never_negative_and_chunks_fit(
    steps: list[tuple[tuple[int, int], float]],
) -> None:
    cost = StepCost(5.0, 1.0)
    for span, ms in steps:
        cost.add(StepShape.of([span]), ms)
    for start in (0, 100, 3000):
        tokens = min(cost.tokens_within(200.0, start, NOTHING), 100_000)
        assert tokens >= 0
        if tokens:
            assert cost.ms(StepShape.of([(start, start + tokens)])) <= 200.0 * 1.05 + 1


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_steps_that_are_all_alike_tell_little_of_others(count: int) -> None:
    cost = StepCost(0.0, 3.0)
    for _ in range(count):
        cost.add(StepShape.of([(0, 1)]), 43.0)
    assert cost.ms(StepShape.of([(0, 1)])) == pytest.approx(43, rel=0.2)
    assert 3000 < cost.ms(StepShape.of([(0, 2000)])) < 12_000
    for _ in range(count):
        cost.add(StepShape.of([(0, 1000)]), 1000.0)
    if count > 1:
        assert cost.ms(StepShape.of([(0, 1000)])) == pytest.approx(1000, rel=0.25)


def test_what_bounds_a_step_is_its_fixed_part_or_its_tokens() -> None:
    cost = StepCost(0.0, 1.0)
    assert cost.bound is None
    for _ in range(20):
        for rows in (1, 4, 8):
            cost.add(StepShape.of([(100, 101)] * rows), 50 + rows)
    assert cost.bound is Bound.MEMORY
    for _ in range(100):
        for tokens in (300, 700):
            cost.add(StepShape.of([(0, tokens)]), 10 + 2 * tokens)
    assert cost.bound is Bound.COMPUTE


def test_busy_is_the_share_of_time_in_steps() -> None:
    busy = Busy(memory_s=1.0)
    assert busy.share == 0
    for step in range(1, 60):
        busy.add(100, step * 0.2)  # a step of 0.1 s every 0.2 s
    assert busy.share == pytest.approx(0.5, abs=0.05)
    busy.tick(60.0)
    assert busy.share == pytest.approx(0.0, abs=0.05)


def test_a_pace_that_saw_nothing_is_zero_and_predicts_nothing() -> None:
    pace = Pace(0.0, seen=False)
    assert (pace.per_s, pace.seconds(5)) == (0.0, 0.0)
    pace.add(10, 2)
    assert (pace.per_s, pace.seconds(5)) == (5.0, 1.0)
