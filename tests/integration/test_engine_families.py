# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Small random models of each family compute what transformers computes."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.e2e.oracle.reference import Oracle
from tests.integration.family_models import VARIANTS, Variant, make_model

from kvtide.engine.loading import LoadedModel, load_model
from kvtide.engine.runner import Chunk


@dataclass(frozen=True)
class Pair:
    variant: Variant
    ours: LoadedModel
    reference: Oracle


@pytest.fixture(scope="module", params=VARIANTS, ids=[v.name for v in VARIANTS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    variant: Variant = request.param
    folder = tmp_path_factory.mktemp(variant.name)
    make_model(variant, folder)
    return Pair(variant, load_model(folder), Oracle(folder))


def _prompt(tokens: int, seed: int) -> list[int]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (tokens,), generator=noise).tolist()


def _expect_close(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=1e-4)


def test_weights_take_the_form_that_is_exact(pair: Pair):
    form = "fp16-packed" if pair.variant.fp16_exact else "plain"

    assert f"weights={form};" in pair.ours.facts.numerics


@pytest.mark.parametrize("chunk", [1, 7, 32, 90])
def test_logits_are_those_of_transformers_for_any_chunks(pair: Pair, chunk: int):
    prompt = _prompt(90, 1)
    expected = pair.reference.logits(prompt, len(prompt))
    run = pair.ours.new_run(90)
    for start in range(0, 90, chunk):
        end = min(start + chunk, 90)
        part = Chunk(run, prompt[start:end], start, want_logits=True)
        [logits] = pair.ours.runner.step([part])
        _expect_close(logits, expected[end - 1])


def test_a_mixed_batch_computes_what_each_would_alone(pair: Pair):
    """Chunks with and without history, single tokens, with and without logits."""
    prompts = [_prompt(tokens, seed) for seed, tokens in enumerate((50, 33, 1, 20))]
    done = [0, 32, 0, 5]
    wanted = [True, True, True, False]
    runs = [pair.ours.new_run(64) for _ in prompts]
    step = pair.ours.runner.step
    before = [
        Chunk(run, prompt[:end], 0)
        for run, prompt, end in zip(runs, prompts, done, strict=True)
        if end
    ]
    assert step(before) == [None, None]
    batch = [
        Chunk(run, prompt[start:], start, want)
        for run, prompt, start, want in zip(runs, prompts, done, wanted, strict=True)
    ]
    logits = step(batch)

    assert [run.length for run in runs] == [50, 33, 1, 20]
    assert logits[3] is None
    for row, prompt in zip(logits[:3], prompts[:3], strict=True):
        _expect_close(row, pair.reference.logits(prompt, 1)[0])
    # the chunk that wanted no logits has left its K and V all the same
    [after] = step([Chunk(runs[3], [9], 20, want_logits=True)])
    _expect_close(after, pair.reference.logits([*prompts[3], 9], 1)[0])


def test_greedy_tokens_are_those_of_generate(pair: Pair):
    prompt = _prompt(40, 3)
    run = pair.ours.new_run(80)
    served: list[int] = []
    new = prompt
    while len(served) < 40:
        [logits] = pair.ours.runner.step(
            [Chunk(run, new, run.length, want_logits=True)]
        )
        assert logits is not None
        new = [int(logits.argmax())]
        served += new

    verdict = pair.reference.check(prompt, served)
    assert verdict.right
    if not verdict.ties:
        assert served == pair.reference.generate(prompt, 40, ignore_eos=True)


def test_one_folder_one_digest(pair: Pair, tmp_path: Path):
    """Other weights, another digest: blocks of two models never mix."""
    other = pair.variant.model(pair.variant.config)
    other.save_pretrained(tmp_path)

    assert load_model(tmp_path).facts.digest != pair.ours.facts.digest
