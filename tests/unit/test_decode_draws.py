# pyright: reportUnknownMemberType=false
"""Draws that look back: the same wherever and however a request came to its row."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.gateway_models import byte_level

from kvtide.bus.messages import GrammarLanguage, GrammarSpec, SamplingSpec
from kvtide.decode.draws import Drawer, Wish
from kvtide.decode.events import Context, Row, Sampled
from kvtide.engine.grammars import Grammars, GrammarVocabulary
from kvtide.kv import RequestId, RequestRef

TOKENIZER = byte_level()
VOCAB = 420
END = TOKENIZER.encode("<|im_end|>").ids[0]
PROMPT = tuple(TOKENIZER.encode("hello the fox").ids)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["the", "fox"]}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = GrammarSpec(GrammarLanguage.JSON_SCHEMA, json.dumps(SCHEMA))
SPEC = SamplingSpec(
    temperature=1.0,
    seed=11,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=0.25,
    logit_bias=((5, 3.0),),
    logprobs=2,
)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    path = tmp_path_factory.mktemp("draws") / "tokenizer.json"
    TOKENIZER.save(str(path))
    made = Grammars(GrammarVocabulary(path, VOCAB, (END,)))
    yield made
    made.close()


def row_of(
    name: str, answer: tuple[int, ...], spec: SamplingSpec, *, attempt: int = 1
) -> Row:
    start = len(PROMPT) + len(answer) - 1
    last = (*PROMPT, *answer)[-1]
    context = Context(PROMPT, answer) if spec.depends else None
    ref = RequestRef(RequestId(name), attempt)
    return Row(ref, start, (last,), spec, (), context)


def logits_of(position: int) -> torch.Tensor:
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(position))


def draw(drawer: Drawer, rows: list[Row], grammars: Grammars) -> tuple[Sampled, ...]:
    for row in rows:
        drawer.prepare(row, grammars)
    drawn, failed = drawer.draw([Wish(row, logits_of(row.start)) for row in rows])
    assert failed == ()
    return drawn


@pytest.mark.parametrize("grammar", [None, JSON], ids=["penalties", "grammar"])
def test_a_row_alone_gives_what_a_followed_request_gets(
    grammars: Grammars, grammar: GrammarSpec | None
):
    """Fail-over: another worker, another attempt, all tokens at once, company."""
    spec = msgspec.structs.replace(SPEC, grammar=grammar)
    followed = Drawer()
    answer: tuple[int, ...] = ()
    for _ in range(24):
        [one] = draw(followed, [row_of("r", answer, spec)], grammars)
        company = [
            row_of("other", (7, 7), SamplingSpec(temperature=0.7, seed=1)),
            row_of("r", answer, spec, attempt=2),
        ]
        again = draw(Drawer(), company, grammars)[1]
        assert (again.token, again.logprobs) == (one.token, one.logprobs)
        if one.token == END:
            break
        answer = (*answer, one.token)
    if grammar is not None:
        assert json.loads(TOKENIZER.decode(list(answer)))["a"] in {"the", "fox"}


def test_a_grammar_that_no_longer_fits_fails_its_row_alone(grammars: Grammars):
    strange = tuple(TOKENIZER.encode("[1]").ids)
    spec = SamplingSpec(temperature=0, grammar=JSON)
    rows = [row_of("bad", strange, spec), row_of("good", (), spec)]
    drawer = Drawer()
    for row in rows:
        drawer.prepare(row, grammars)
    drawn, failed = drawer.draw([Wish(row, logits_of(0)) for row in rows])

    assert [one.ref.request for one in drawn] == ["good"]
    assert [one.ref.request for one in failed] == ["bad"]
    assert "grammar" in failed[0].reason


def test_a_worker_without_a_vocabulary_fails_the_row():
    row = row_of("r", (), SamplingSpec(temperature=0, grammar=JSON))
    drawer = Drawer()
    drawer.prepare(row, None)
    drawn, failed = drawer.draw([Wish(row, logits_of(0))])

    assert drawn == ()
    assert "vocabulary" in failed[0].reason


def test_what_is_remembered_is_bounded(
    monkeypatch: pytest.MonkeyPatch, grammars: Grammars
):
    monkeypatch.setattr("kvtide.decode.draws.REMEMBERED", 2)
    drawer = Drawer()
    first = draw(drawer, [row_of("a", (5, 6), SPEC)], grammars)
    for name in "bcd":
        draw(drawer, [row_of(name, (), SPEC)], grammars)

    assert draw(drawer, [row_of("a", (5, 6), SPEC)], grammars) == first
