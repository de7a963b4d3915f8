# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvtide.engine.distribution import inverted, weights_of
from kvtide.engine.errors import NonFiniteLogits
from kvtide.engine.sampler import Draw, Sampler
from kvtide.engine.sampling import SamplingParams, uniform

VOCAB = 1000


def _logits(rows: int, seed: int = 1, scale: float = 2.5) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, VOCAB, generator=noise)


def _draw(
    logits: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[SamplingParams],
    places: Sequence[int],
) -> list[int]:
    draws = [Draw(one, place) for one, place in zip(params, places, strict=True)]
    return [drawn.token for drawn in Sampler().draw(logits, draws)]


def _reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Transformers' warpers in float64, for a row."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    ids = torch.zeros(1, 1, dtype=torch.long)
    return torch.softmax(chain(ids, logits[None].double()), -1)[0]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=1.7, top_k=40),
        SamplingParams(top_k=5000),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=3.0, top_p=0.999),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=0.05),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02),
    ],
)
def test_distribution_is_that_of_transformers(params: SamplingParams):
    # beside a row of each other kind: filters must not reach over
    others = [
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.4),
        SamplingParams(min_p=0.3),
    ]
    rows = _logits(4)
    for row in rows:
        batch = torch.cat((row[None], rows[:3]))
        ours = weights_of(batch, [params, *others])[0]

        assert torch.equal(ours > 0, _reference(row, params) > 0)
        torch.testing.assert_close(
            (ours / ours.sum()).double(), _reference(row, params), rtol=1e-5, atol=1e-7
        )


def test_a_wide_nucleus_is_whole():
    """Flat distributions: most of a large vocabulary is inside."""
    flat = 0.1 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.01)]
    weights = weights_of(flat, params)
    for row, mine, one in zip(flat, weights, params, strict=True):
        assert torch.equal(mine > 0, _reference(row, one) > 0)


def test_draws_follow_the_distribution():
    """Chi-squared over many draws; cells of little mass are pooled."""
    params = SamplingParams(temperature=0.7, top_k=30, seed=5)
    row = _logits(1)
    expected = _reference(row[0], params)
    draws = 20_000
    drawn = _draw(row.expand(draws, -1), [params] * draws, range(draws))
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB).double()

    assert bool((counts[expected == 0] == 0).all())
    big = expected * draws >= 10
    statistic = ((counts - expected * draws) ** 2 / (expected * draws))[big].sum()
    degrees = int(big.sum()) - 1
    # the normal approximation of Wilson and Hilferty at 99.9 %
    part = 2 / (9 * degrees)
    assert float(statistic) < degrees * (1 - part + 3.09 * math.sqrt(part)) ** 3


def test_a_token_is_the_same_alone_and_in_any_batch():
    logits = _logits(12)
    params = [
        SamplingParams(temperature=0.5 * (i % 3), top_p=0.9, top_k=i, seed=i)
        for i in range(12)
    ]
    places = [100 + i for i in range(12)]
    together = _draw(logits, params, places)
    alone = [_draw([logits[i]], [params[i]], [places[i]])[0] for i in range(12)]
    backwards = _draw(logits.flip(0), params[::-1], places[::-1])

    assert together == alone == backwards[::-1]


def test_noise_moves_a_token_only_at_an_edge():
    """Logits that differ by rounding give the same tokens, edges aside."""
    params = [SamplingParams(seed=9)] * 500
    logits = _logits(500)
    noisy = logits + 1e-5 * _logits(500, seed=2)
    places = range(500)
    moved = [
        i
        for i, (a, b) in enumerate(
            zip(
                _draw(logits, params, places),
                _draw(noisy, params, places),
                strict=True,
            )
        )
        if a != b
    ]
    edges = torch.softmax(logits.double(), -1).cumsum(-1)
    for i in moved:
        assert float((edges[i] - uniform(9, 0, i)).abs().min()) < 1e-4
    assert len(moved) < 25


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6, 1e-4])
def test_temperature_near_zero_takes_the_largest(temperature: float):
    logits = _logits(3)
    params = [SamplingParams(temperature, top_k=2, seed=i) for i in range(3)]

    assert _draw(logits, params, [1, 2, 3]) == logits.argmax(-1).tolist()


def test_a_hidden_token_is_never_drawn():
    logits = torch.full((200, 8), float("-inf"))
    logits[:, 3] = 0.0
    logits[:, 5] = 1.0
    params = [SamplingParams(seed=i) for i in range(200)]

    assert set(_draw(logits, params, [0] * 200)) == {3, 5}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_logits_that_are_no_numbers(bad: float):
    logits = _logits(3)
    logits[1, 7] = bad
    with pytest.raises(NonFiniteLogits) as caught:
        _draw(logits, [SamplingParams()] * 3, [0, 0, 0])

    assert caught.value.row == 1


def test_logprobs_are_those_of_the_raw_logits():
    """Whatever changes the draw: temperature, bans, biases, penalties."""
    logits = _logits(3)
    least = logits.argmin(-1).tolist()
    wild = SamplingParams(
        temperature=0, logprobs=3, logit_bias=((least[0], 100.0), (5, -100.0))
    )
    none = SamplingParams(temperature=3.0, top_k=2)
    own = SamplingParams(temperature=0, logprobs=0)
    draws = [Draw(wild, 0), Draw(none, 0), Draw(own, 0)]
    first, second, third = Sampler().draw(logits, draws)
    expected = torch.log_softmax(logits, -1)

    assert first.logprobs is not None
    assert first.token == first.logprobs.token_id == least[0]
    assert first.logprobs.logprob == pytest.approx(float(expected[0].min()))
    assert first.logprobs.top_ids == tuple(logits[0].topk(3).indices.tolist())
    assert first.logprobs.top_logprobs[0] == pytest.approx(float(expected[0].max()))
    assert second.logprobs is None
    assert third.logprobs is not None
    assert third.logprobs.top_ids == ()
    assert third.logprobs.logprob == pytest.approx(float(expected[2].max()))


def test_nothing_to_sample():
    assert Sampler().draw([], []) == []


@pytest.mark.parametrize("vocab", [3, 256, 1000, 50_257])
def test_each_token_stands_where_the_weights_before_it_end(vocab: int):
    noise = torch.Generator().manual_seed(vocab)
    weights = torch.softmax(3 * torch.randn(4, vocab, generator=noise), -1)
    weights[:, 1::3] = 0.0  # filters leave holes, also whole runs of them
    weights[1, : vocab // 2] = 0.0
    edges = weights.double().cumsum(-1)
    at = [0.0, 0.25, 0.7, 1 - 2**-53]
    for shift in range(4):
        numbers = at[shift:] + at[:shift]
        tokens = torch.tensor(inverted(weights, numbers))[:, None]
        wanted = torch.tensor(numbers, dtype=torch.float64)[:, None] * edges[:, -1:]
        end = edges.gather(1, tokens)
        own = weights.double().gather(1, tokens)
        assert bool((own > 0).all())
        assert bool((end + 1e-6 > wanted).all())
        assert bool((end - own - 1e-6 <= wanted).all())


def test_a_row_is_inverted_the_same_in_any_batch():
    weights = torch.softmax(_logits(33), -1)
    numbers = [uniform(1, 0, place) for place in range(33)]
    alone = [
        inverted(row[None], [number])[0]
        for row, number in zip(weights, numbers, strict=True)
    ]
    assert inverted(weights, numbers) == alone
