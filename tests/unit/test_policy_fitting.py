"""Fits find what was there, through outliers and changes; profiles seed them."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.policy import LoadCurve, PrefillCurve, StepCurve
from kvtide.policy.analytic import (
    A800,
    H800,
    ModelShape,
    break_even_bytes_per_s,
    load_curve_of,
    prefill_curve_of,
    prefill_s,
    step_curve_of,
    step_s,
)
from kvtide.policy.class_costs import CONFIDENT, ClassCosts, ClassProfile
from kvtide.policy.curves import attended_pairs
from kvtide.policy.fitting import RobustFit
from kvtide.policy.profiles import ProfileError, read_profiles, write_profiles

MODEL = ModelShape()


def test_the_papers_break_even_bandwidths() -> None:
    """6 GB/s for 8 x A800 and 19 GB/s for 8 x H800 at 8,192 tokens (Table 1)."""
    assert round(break_even_bytes_per_s(MODEL, A800, 8192) / 1e9) == 6
    assert round(break_even_bytes_per_s(MODEL, H800, 8192) / 1e9) == 19
    d, p = MODEL.dimension, 8192
    formula = 2 * d * 2 / (8 * (4 * p * d + 22 * d * d)) * A800.flops_per_s
    assert break_even_bytes_per_s(MODEL, A800, p) == pytest.approx(formula)


def test_the_papers_kv_and_prefill_times() -> None:
    assert MODEL.kv_bytes == 320 * 1024
    assert prefill_s(MODEL, A800, 8192) == pytest.approx(0.46, abs=0.005)
    assert prefill_s(MODEL, A800, 131_072) == pytest.approx(24.2, abs=0.05)


@settings(deadline=None)
@given(st.integers(1, 131_072), st.floats(0, 1))
def test_the_curve_is_the_formula(tokens: int, share: float) -> None:
    reused = int(tokens * share)
    curve = prefill_curve_of(MODEL, A800)
    expected = prefill_s(MODEL, A800, tokens, reused) * 1000
    assert curve.ms(tokens - reused, reused) == pytest.approx(expected, rel=1e-9)
    assert step_curve_of(MODEL, A800).ms(1, tokens) == pytest.approx(
        step_s(MODEL, A800, 1, tokens) * 1000
    )
    assert load_curve_of(A800).far_byte_ms == pytest.approx(1e-8)


def prompts(rng: random.Random, count: int) -> list[tuple[float, float]]:
    return [(rng.randint(1, 8000), rng.randint(0, 60_000)) for _ in range(count)]


def test_a_fit_finds_the_curve_through_outliers() -> None:
    rng = random.Random(3)  # noqa: S311
    truth = PrefillCurve(20.0, 0.05, 2e-7)
    costs = ClassCosts()
    for number, (new, reused) in enumerate(prompts(rng, 300)):
        ms = truth.ms(new, reused) * rng.uniform(0.97, 1.03)
        if number > 20 and rng.random() < 0.1:
            ms *= rng.uniform(5, 50)
        costs.prefilled(new, attended_pairs(new, reused), ms)
    found = costs.prefill
    assert found is not None
    for new, reused in prompts(rng, 20):
        assert found.ms(new, reused) == pytest.approx(truth.ms(new, reused), rel=0.1)
    error = costs.errors.prefill
    assert error is not None
    assert error < 0.05


def test_a_fit_follows_a_change() -> None:
    rng = random.Random(4)  # noqa: S311
    costs = ClassCosts()
    for truth in (StepCurve(20, 1, 1e-4), StepCurve(40, 2, 2e-4)):
        for _ in range(300):
            rows = rng.randint(1, 64)
            kv_tokens = rows * rng.randint(100, 4000)
            costs.stepped(rows, kv_tokens, truth.ms(rows, kv_tokens))
        found = costs.step
        assert found is not None
        assert found.ms(30, 40_000) == pytest.approx(truth.ms(30, 40_000), rel=0.05)


def test_loads_share_a_link() -> None:
    rng = random.Random(5)  # noqa: S311
    truth = LoadCurve(2.0, 1e-7, 4e-7)
    costs = ClassCosts()
    for _ in range(200):
        near, far = rng.randint(0, 10**8), rng.randint(0, 10**8)
        flows = rng.randint(0, 4)
        ms = 2.0 + truth.near_byte_ms * near + truth.far_byte_ms * far * (1 + flows)
        costs.loaded(near, far, flows, ms)
    found = costs.loading
    assert found is not None
    assert found.near_byte_ms == pytest.approx(truth.near_byte_ms, rel=0.05)
    assert found.far_byte_ms == pytest.approx(truth.far_byte_ms, rel=0.05)


def test_nothing_is_believed_before_enough_was_seen_unless_profiled() -> None:
    costs = ClassCosts()
    for number in range(CONFIDENT):
        assert costs.prefill is None
        costs.prefilled(100 + number, 5000, 50.0)
    assert costs.prefill is not None
    seed = PrefillCurve(1.0, 0.5, 1e-6)
    assert ClassCosts(ClassProfile(prefill=seed)).prefill == seed


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e5), st.floats(0, 1e9), st.floats(allow_nan=True)),
        max_size=40,
    )
)
def test_parameters_are_numbers_and_never_negative(
    samples: list[tuple[float, float, float]],
) -> None:
    fit = RobustFit((1.0, 0.1, 1e-6), (1.0, 0.1, 1e-6))
    for new, pairs, ms in samples:
        fit.add((1.0, new, pairs), ms)
    assert all(0 <= value < 1e300 for value in fit.theta)


def test_profiles_are_read_as_they_were_written() -> None:
    profiles = {
        "": ClassProfile(prefill=PrefillCurve(1.0, 0.05, 1e-7)),
        'a "class"': ClassProfile(
            step=StepCurve(7.0, 0.1, 1e-5), loading=LoadCurve(0.1, 1e-9, 2e-9)
        ),
    }
    for json in (False, True):
        assert read_profiles(write_profiles(profiles, json=json), json=json) == profiles


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[x", "x"),
        ("[x.prefill]\nfixed_ms = 1", "token_ms"),
        ("[x.prefil]\nfixed_ms = 1", "prefil"),
        ("[x.step]\nfixed_ms=-1\nrow_ms=1\npair_ms=1", "below zero"),
        ("[x.step]\nfixed_ms='a'\nrow_ms=1\npair_ms=1", "float"),
    ],
)
def test_a_bad_profile_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        read_profiles(text)
