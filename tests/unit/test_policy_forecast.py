"""Decode's load at a later time, how long answers get, and who is taken."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvtide.kv import NodeId, TenantId
from kvtide.policy import (
    Ask,
    Bottleneck,
    Estimate,
    Prediction,
    Targets,
    TenantTargets,
    overload,
)
from kvtide.policy.answers import AnswerLengths
from kvtide.policy.forecast import DecodeForecast, Stay

ONE = np.array([0])
ASK = Ask(1000, 100, 64, 1_000_000)
P, D = NodeId("p"), NodeId("d")


def estimate(ttft_ms: float, tbt_ms: float, queue_ms: float = 0.0) -> Estimate:
    return Estimate(P, D, 0, queue_ms, 0.0, ttft_ms, ttft_ms, tbt_ms)


def stay(start_s: float, tbt_ms: float = 100.0, limit: float = 1000.0) -> Stay:
    return Stay(0, start_s, tbt_ms, 500.0, limit)


def rows(forecast: DecodeForecast, now_s: float, then_s: float) -> float:
    return float(forecast.coming(ONE, now_s, then_s).rows[0])


def test_a_request_comes_when_its_prefill_is_done_and_goes_after_its_life() -> None:
    forecast = DecodeForecast(Prediction.UNIFORM, AnswerLengths(100.0))
    forecast.place("r", stay(10.0), 0.0)
    # pending now: it is among what is booked, so before its start one less is there
    assert rows(forecast, 0.0, 5.0) == -1
    assert rows(forecast, 0.0, 12.0) == 0
    assert rows(forecast, 0.0, 25.0) == -1
    assert rows(forecast, 12.0, 25.0) == -1
    forecast.remove("r", 13.0)
    assert rows(forecast, 13.0, 25.0) == 0
    assert len(forecast) == 0


def test_fitted_answers_leave_little_by_little() -> None:
    lengths = AnswerLengths(100.0, fade=0.99)
    for tokens in range(1, 400):
        lengths.ended(tokens)
    assert lengths.mean_tokens == pytest.approx(300, rel=0.15)
    forecast = DecodeForecast(Prediction.FITTED, lengths)
    forecast.place("r", stay(0.0), 0.0)
    left = [1 + rows(forecast, 0.0, float(second)) for second in range(0, 45, 5)]
    assert left == sorted(left, reverse=True)
    assert 0 < left[4] < left[1]
    assert left[-1] < 0.15


def test_without_prediction_nothing_changes() -> None:
    forecast = DecodeForecast(Prediction.OFF)
    forecast.place("r", stay(10.0), 0.0)
    assert rows(forecast, 0.0, 12.0) == 0


def test_the_time_to_retry_is_when_enough_have_ended() -> None:
    forecast = DecodeForecast(Prediction.UNIFORM, AnswerLengths(100.0))
    for number in range(4):
        forecast.place(number, stay(0.0, limit=50.0 if number < 2 else 1000.0), 0.0)
    assert forecast.calm_ms(ONE, 0.0, 0.5) == pytest.approx(5000)
    assert forecast.calm_ms(ONE, 0.0, 0.0) == pytest.approx(10_000)


@settings(deadline=None)
@given(
    st.sampled_from(list(Prediction)),
    st.lists(
        st.tuples(
            st.sampled_from(["place", "remove", "clear", "wait"]),
            st.integers(0, 5),
            st.integers(0, 3),
            st.floats(0, 200),
            st.floats(0, 5000),
        ),
        max_size=40,
    ),
)
def test_any_story_ends_with_nothing_left(
    prediction: Prediction, story: list[tuple[str, int, int, float, float]]
) -> None:
    forecast = DecodeForecast(prediction)
    now_s = 1000.0
    workers = np.arange(4)
    for what, name, worker, seconds, tokens in story:
        match what:
            case "place":
                there = Stay(worker, now_s + seconds, 50.0, 100.0, tokens)
                forecast.place(name, there, now_s)
            case "remove":
                forecast.remove(name, now_s)
            case "clear":
                forecast.clear_worker(worker)
            case _:
                now_s += seconds
        coming = forecast.coming(workers, now_s, now_s + 5, 10)
        assert (coming.rows >= -6.001).all()
        assert (coming.rows <= 6.001).all()
        assert len(forecast) <= 6
    now_s += 1000
    assert np.allclose(forecast.coming(workers, now_s, now_s + 5).rows, 0)
    assert len(forecast) == 0


def test_targets_are_the_requests_then_the_tenants_then_the_defaults() -> None:
    targets = Targets(
        ttft_ms=1000, tbt_ms=100, tenants={TenantId("t"): TenantTargets(tbt_ms=50)}
    )
    assert targets.of(TenantId("t"), None, None) == (1000, 50)
    assert targets.of(TenantId("t"), 7, 8) == (7, 8)
    assert targets.of(TenantId("other"), None, None) == (1000, 100)


def test_the_larger_load_is_what_is_named() -> None:
    targets = Targets(ttft_ms=1000, tbt_ms=100)
    late = overload(ASK, estimate(1500, 120, queue_ms=900), targets)
    assert late is not None
    assert late.bottleneck is Bottleneck.PREFILL
    assert late.retry_after_ms == pytest.approx(500)
    alone = overload(ASK, replace(estimate(1500, 120), prefill=D), targets)
    assert alone is not None
    assert alone.bottleneck is Bottleneck.DECODE
    slow = overload(ASK, estimate(1100, 150), targets)
    assert slow is not None
    assert slow.bottleneck is Bottleneck.DECODE
    assert overload(ASK, estimate(900, 150), replace(targets, early=False)) is None


@settings(deadline=None)
@given(st.floats(0, 5000), st.floats(0, 500), st.floats(0, 5000), st.integers(-2, 2))
def test_more_load_or_less_priority_never_gets_a_refused_request_in(
    ttft_ms: float, tbt_ms: float, queue_ms: float, priority: int
) -> None:
    targets = Targets(queue_ms=4000, ttft_ms=2000, tbt_ms=200)
    best = estimate(ttft_ms, tbt_ms, queue_ms)
    asked = replace(ASK, priority=priority)
    found = overload(asked, best, targets)
    if found is None:
        assert overload(replace(asked, priority=priority + 1), best, targets) is None
        less = estimate(ttft_ms / 2, tbt_ms / 2, queue_ms / 2)
        assert overload(asked, less, targets) is None
    else:
        assert found.reason
        assert found.retry_after_ms is None or found.retry_after_ms >= 100
        more = estimate(ttft_ms * 2, tbt_ms * 2, queue_ms * 2)
        assert overload(asked, more, targets) is not None
