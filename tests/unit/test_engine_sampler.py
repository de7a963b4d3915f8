# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvtide.engine.errors import NonFiniteLogits
from kvtide.engine.sampler import Sampler, filtered
from kvtide.engine.sampling import SamplingParams, uniform

VOCAB = 1000


def _logits(rows: int, seed: int = 1, scale: float = 2.5) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, VOCAB, generator=noise)


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
    for row in _logits(4):
        ours = torch.from_numpy(filtered(row, params))

        assert torch.equal(ours > 0, _reference(row, params) > 0)
        torch.testing.assert_close(
            (ours / ours.sum()).double(), _reference(row, params), rtol=1e-5, atol=1e-7
        )


def test_draws_follow_the_distribution():
    """Chi-squared over many draws; cells of little mass are pooled."""
    params = SamplingParams(temperature=0.7, top_k=30, seed=5)
    row = _logits(1)
    expected = _reference(row[0], params)
    draws = 20_000
    drawn = Sampler().sample(row.expand(draws, -1), [params] * draws, range(draws))
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
    together = Sampler().sample(logits, params, places)
    alone = [
        Sampler().sample([logits[i]], [params[i]], [places[i]])[0] for i in range(12)
    ]
    backwards = Sampler().sample(logits.flip(0), params[::-1], places[::-1])

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
                Sampler().sample(logits, params, places),
                Sampler().sample(noisy, params, places),
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

    assert Sampler().sample(logits, params, [1, 2, 3]) == logits.argmax(-1).tolist()


def test_a_hidden_token_is_never_drawn():
    logits = torch.full((200, 8), float("-inf"))
    logits[:, 3] = 0.0
    logits[:, 5] = 1.0
    params = [SamplingParams(seed=i) for i in range(200)]

    assert set(Sampler().sample(logits, params, [0] * 200)) == {3, 5}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_logits_that_are_no_numbers(bad: float):
    logits = _logits(3)
    logits[1, 7] = bad
    with pytest.raises(NonFiniteLogits) as caught:
        Sampler().sample(logits, [SamplingParams()] * 3, [0, 0, 0])

    assert caught.value.row == 1


def test_logprobs_are_those_of_the_raw_logits():
    logits = _logits(2)
    chosen = logits.argmin(-1).tolist()
    first, second = Sampler().logprobs(logits, chosen, 3)
    expected = torch.log_softmax(logits, -1)

    assert first.token_id == chosen[0]
    assert first.logprob == pytest.approx(float(expected[0].min()))
    assert second.top_ids == tuple(logits[1].topk(3).indices.tolist())
    assert second.top_logprobs[0] == pytest.approx(float(expected[1].max()))


def test_nothing_to_sample():
    assert Sampler().sample([], [], []) == []
