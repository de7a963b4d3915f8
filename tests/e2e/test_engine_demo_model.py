# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The real demo model: the engine's greedy tokens are those of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import json
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import (
    TIE_GAP,
    Oracle,
    judge,
)
from tokenizers import Tokenizer

from kvtide.engine.demo import default_cache_dir, ensure_demo_model
from kvtide.engine.loading import LoadedModel, load_model
from kvtide.engine.memory import KEY, VALUE, KvRun
from kvtide.engine.runner import Chunk
from kvtide.engine.sampler import Draw, Sampler
from kvtide.engine.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 64
LENGTHS = (1, 64, 65, 190)
NEW_TOKENS = 16


@dataclass(frozen=True)
class Demo:
    folder: Path
    model: LoadedModel
    oracle: Oracle
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def demo() -> Demo:
    folder = ensure_demo_model(default_cache_dir())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [
        text_tokens(lambda text: tokenizer.encode(text).ids, tokens, first_sentence=i)
        for i, tokens in enumerate(LENGTHS)
    ]
    return Demo(folder, load_model(folder), Oracle(folder), prompts)


def _prefill(demo: Demo, prompt: Sequence[int], chunk: int) -> KvRun:
    """All but the last token, as a prefill worker does."""
    run = demo.model.new_run(demo.model.facts.max_tokens)
    last = len(prompt) - 1
    for start in range(run.length, last, chunk):
        end = min(start + chunk, last)
        demo.model.runner.step([Chunk(run, prompt[start:end], start)])
    return run


def _decode(
    demo: Demo, runs: Sequence[KvRun], prompts: Sequence[Sequence[int]], new: int
) -> list[list[int]]:
    """Greedy tokens of all sequences in one batch, end of text ignored."""
    served: list[list[int]] = [[] for _ in prompts]
    tokens = [prompt[-1] for prompt in prompts]
    for _ in range(new):
        logits = demo.model.runner.step(
            [
                Chunk(run, [token], run.length, want_logits=True)
                for run, token in zip(runs, tokens, strict=True)
            ]
        )
        rows = [row for row in logits if row is not None]
        greedy = SamplingParams(temperature=0)
        drawn = Sampler().draw(rows, [Draw(greedy, run.length) for run in runs])
        tokens = [one.token for one in drawn]
        for ids, token in zip(served, tokens, strict=True):
            ids.append(token)
    return served


def test_weights_are_packed_because_that_is_exact(demo: Demo):
    facts = demo.model.facts

    assert "weights=fp16-packed" in facts.numerics
    assert (facts.layers, facts.kv_heads, facts.head_dim) == (30, 3, 64)
    assert (facts.vocab_size, facts.max_tokens) == (49152, 8192)
    assert facts.eos_token_ids == (2,)


def test_the_verdict_by_one_forward_pass_is_that_of_generate(demo: Demo):
    for prompt in demo.prompts:
        generated = demo.oracle.generate(prompt, NEW_TOKENS, ignore_eos=True)
        verdict = demo.oracle.check(prompt, generated)
        assert verdict.mismatch is None
        assert verdict.tokens == NEW_TOKENS

        place = NEW_TOKENS // 2
        wrong = [*generated]
        wrong[place] = (wrong[place] + 1) % demo.model.facts.vocab_size
        mismatch = demo.oracle.check(prompt, wrong).mismatch
        assert mismatch is not None
        assert (mismatch.index, mismatch.expected) == (place, generated[place])


def test_generate_stops_at_the_end_of_text(demo: Demo):
    tokenizer = Tokenizer.from_file(str(demo.folder / "tokenizer.json"))
    chat = "<|im_start|>user\nSay only: yes<|im_end|>\n<|im_start|>assistant\n"
    served = demo.oracle.generate(tokenizer.encode(chat).ids, 200)

    assert served[-1] == 2
    assert demo.oracle.ended_rightly(served, 200)
    assert not demo.oracle.ended_rightly(served[:-1], 200)
    assert not demo.oracle.ended_rightly([*served, 5], 200)


@pytest.mark.parametrize(("chunk", "prompts"), [(1, 2), (50, 4), (64, 4), (8192, 4)])
def test_greedy_tokens_for_any_chunks_decoded_in_one_batch(
    demo: Demo, chunk: int, prompts: int
):
    runs = [_prefill(demo, prompt, chunk) for prompt in demo.prompts[:prompts]]
    served = _decode(demo, runs, demo.prompts[:prompts], NEW_TOKENS)

    for prompt, ids in zip(demo.prompts[:prompts], served, strict=True):
        verdict = demo.oracle.check(prompt, ids)
        assert verdict.mismatch is None
        if not verdict.ties:
            expected = demo.oracle.generate(prompt, NEW_TOKENS, ignore_eos=True)
            assert ids == expected


def test_greedy_tokens_on_a_prefix_copied_block_by_block(demo: Demo):
    prompt = demo.prompts[-1]
    first = _prefill(demo, prompt, 8192)
    reused = (len(prompt) - 1) // BLOCK * BLOCK
    second = demo.model.new_run(len(prompt) + NEW_TOKENS)
    for start in range(0, reused, BLOCK):
        for layer in range(demo.model.facts.layers):
            for kind in (KEY, VALUE):
                source = first.part(layer, kind, start, start + BLOCK)
                second.part(layer, kind, start, start + BLOCK)[:] = source
    second.length = reused
    demo.model.runner.step([Chunk(second, prompt[reused:-1], reused)])
    [served] = _decode(demo, [second], [prompt], NEW_TOKENS)

    assert demo.oracle.check(prompt, served).right


def test_chat_template_and_special_tokens(demo: Demo):
    config = json.decode((demo.folder / "tokenizer_config.json").read_bytes())
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    messages = [{"role": "user", "content": "Hi"}]
    text = template.render(messages=messages, add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(demo.folder / "tokenizer.json"))
    encoded = tokenizer.encode(text)

    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by"
        " Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # no beginning-of-text token of its own: the template brings it
    assert encoded.ids[0] == 1
    assert encoded.ids.count(1) == 3
    assert encoded.ids.count(2) == 2
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.encode("a 2026").tokens == ["a", "Ġ", "2", "0", "2", "6"]


def test_the_tie_rule():
    """A token within the gap of the top is right, and the place counts as a tie."""
    logits = torch.tensor(
        [[0.0, 5.0, 5.0 - TIE_GAP / 2], [0.0, 5.0, 5.0 - TIE_GAP * 2], [0.0, 1.0, 9.0]]
    )

    assert judge(logits, [2, 1, 2]).right
    assert judge(logits, [1, 1, 2]).ties == 1
    assert judge(logits, [2, 1, 2]).tie_share == pytest.approx(1 / 3)
    mismatch = judge(logits, [1, 2, 0]).mismatch
    assert mismatch is not None
    assert (mismatch.index, mismatch.served, mismatch.expected) == (1, 2, 1)
    assert mismatch.behind == pytest.approx(TIE_GAP * 2, rel=1e-2)
