# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""What changes logits before a draw: compared with plain definitions, row by row."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from kvtide.engine.adjust import adjusted
from kvtide.engine.history import TokenHistory
from kvtide.engine.sampler import Draw, Sampler
from kvtide.engine.sampling import SamplingParams

VOCAB = 70
GREEDY = SamplingParams(temperature=0)

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=40)
amount = st.floats(-2, 2, width=16)


def _logits(rows: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(rows)
    return 3 * torch.randn(rows, VOCAB, generator=noise)


def _defined(
    row: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
) -> torch.Tensor:
    """Transformers' repetition penalty, then OpenAI's formula for the other two."""
    changed = row.clone()
    for token, value in params.logit_bias:
        changed[token] += value
    seen = torch.tensor([[*prompt, *answer]], dtype=torch.long)
    if seen.numel():
        penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        changed = penalty(seen, changed[None])[0]  # pyright: ignore[reportArgumentType]
    for token, count in Counter(answer).items():
        changed[token] -= params.frequency_penalty * count + params.presence_penalty
    return changed


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(tokens, tokens, st.floats(0.5, 2, width=16), amount, amount),
        min_size=1,
        max_size=4,
    )
)
def test_penalties_are_as_defined_for_each_row(
    rows: list[tuple[list[int], list[int], float, float, float]],
):
    logits = _logits(len(rows))
    before = logits.clone()
    draws: list[Draw] = []
    for prompt, answer, repetition, frequency, presence in rows:
        history = TokenHistory(prompt)
        history.follow(answer)
        params = replace(
            GREEDY,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            logit_bias=((3, 4.0), (3, -1.5), (60, -100.0)),
        )
        draws.append(Draw(params, 0, history=history))
    changed = adjusted(logits, draws)

    assert torch.equal(logits, before)
    for row, mine, draw, (prompt, answer, *_) in zip(
        logits, changed, draws, rows, strict=True
    ):
        expected = _defined(row, draw.params, prompt, answer)
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-5)


@settings(deadline=None)
@given(prompt=tokens, answer=tokens, cut=st.integers(0, 40))
def test_a_history_follows_from_the_tokens_alone(
    prompt: list[int], answer: list[int], cut: int
):
    """Followed token by token, taken over in the middle, or gone back: the same."""
    whole = TokenHistory(prompt)
    whole.follow(answer)
    stepped = TokenHistory(prompt)
    for end in range(len(answer) + 1):
        stepped.follow(answer[:end])
    back = TokenHistory(prompt)
    back.follow(answer)
    back.follow(answer[:cut])
    back.follow(answer)

    expected = dict(zip(whole.ids.tolist(), whole.counts.tolist(), strict=True))
    assert expected == {t: answer.count(t) for t in {*prompt, *answer}}
    for other in (stepped, back):
        told = dict(zip(other.ids.tolist(), other.counts.tolist(), strict=True))
        assert told == expected


def test_a_long_history_outgrows_its_first_room():
    history = TokenHistory(range(1000))
    history.follow([5, 5, 2000])

    assert len(history.ids) == 1001
    assert history.counts[5] == 2
    assert (history.ids[-1], history.counts[-1]) == (2000, 1)


def test_nothing_to_change_copies_nothing():
    logits = _logits(2)

    assert adjusted(logits, [Draw(GREEDY, 0)] * 2) is logits


def _mask(allowed: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def test_a_mask_leaves_what_a_grammar_allows():
    logits = _logits(3)
    draws = [
        Draw(GREEDY, 0, mask=_mask([0, 31, 32, 69])),
        Draw(GREEDY, 0),
        Draw(SamplingParams(temperature=5.0, seed=1), 7, mask=_mask([12])),
    ]
    changed = adjusted(logits, draws)

    assert changed[0].isfinite().nonzero()[:, 0].tolist() == [0, 31, 32, 69]
    assert torch.equal(changed[1], logits[1])
    assert Sampler().draw(logits, draws)[2].token == 12


def test_ids_behind_the_masks_end_are_forbidden():
    draw = Draw(GREEDY, 0, mask=_mask(range(64))[:2])

    assert adjusted(_logits(1), [draw])[0].isfinite().sum() == 64


def test_banned_ids_are_not_drawn_unless_nothing_else_is_left():
    logits = _logits(1)
    best = int(logits.argmax())
    [second] = Sampler().draw(logits, [Draw(GREEDY, 0, banned=(best,))])
    [only] = Sampler().draw(
        logits, [Draw(GREEDY, 0, banned=(best,), mask=_mask([best]))]
    )

    assert second.token == int(logits[0].topk(2).indices[1])
    assert only.token == best


def test_penalties_without_a_history_are_refused():
    with pytest.raises(ValueError, match="history"):
        Draw(SamplingParams(repetition_penalty=1.1), 0)
