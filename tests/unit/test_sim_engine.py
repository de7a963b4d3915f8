"""The made-up model: every byte of KV matters, and nothing else does."""

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import SamplingSpec
from kvtide.sim.engine import FACTS, LAYOUT, SimRun, undisturbed

SAMPLING = SamplingSpec(temperature=0.0, seed=7)
PROMPTS = st.lists(st.integers(1, FACTS.vocab_size - 1), min_size=2, max_size=40)


@given(prompt=PROMPTS, cut=st.integers(1, 39))
@settings(max_examples=50, deadline=None)
def test_the_kv_does_not_depend_on_how_it_was_cut(prompt: list[int], cut: int) -> None:
    whole, pieces = SimRun(64), SimRun(64)
    whole.compute(prompt, 0)
    cut = min(cut, len(prompt))
    pieces.compute(prompt[:cut], 0)
    pieces.compute(prompt[cut:], cut)
    for part in range(LAYOUT.parts):
        assert whole.part(part, 0, 64) == pieces.part(part, 0, 64)


@given(prompt=PROMPTS, part=st.integers(0, LAYOUT.parts - 1), at=st.data())
@settings(max_examples=50, deadline=None)
def test_one_wrong_byte_changes_the_next_token(
    prompt: list[int], part: int, at: st.DataObject
) -> None:
    run = SimRun(64)
    run.compute(prompt, 0)
    before = [run.draw(len(prompt), SamplingSpec(seed=s), ()) for s in range(4)]
    position = at.draw(st.integers(0, len(prompt) - 1))
    run.part(part, position, position + 1)[0] ^= 1
    after = [run.draw(len(prompt), SamplingSpec(seed=s), ()) for s in range(4)]
    assert after != before


def test_an_answer_is_what_a_single_run_gives() -> None:
    answer = undisturbed((5, 6, 7), SAMPLING, 10)
    assert len(answer) == 10 or 0 not in answer
    assert answer == undisturbed((5, 6, 7), SAMPLING, 20)[:10]
    assert answer[3:] == undisturbed((5, 6, 7, *answer[:3]), SAMPLING, 7)
    assert answer != undisturbed((5, 6, 8), SAMPLING, 10)


def test_banned_tokens_are_not_drawn() -> None:
    run = SimRun(16)
    run.compute([1, 2, 3], 0)
    token = run.draw(3, SAMPLING, ())
    assert run.draw(3, SAMPLING, (token,)) != token


def test_a_run_that_was_given_back_is_used_and_given_back_no_more() -> None:
    run = SimRun(16)
    run.close()
    with pytest.raises(RuntimeError, match="freed"):
        run.compute([1], 0)
    with pytest.raises(RuntimeError, match="twice"):
        run.close()
