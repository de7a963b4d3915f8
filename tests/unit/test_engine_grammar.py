# pyright: reportUnknownMemberType=false
"""Answers held to grammars: what is refused, and that the state follows from tokens."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvtide.engine.errors import GrammarFailed, InvalidGrammar, UnsupportedModel
from kvtide.engine.grammar import (
    MAX_SOURCE_CHARS,
    Grammar,
    GrammarKind,
    check_grammar,
    choice_grammar,
)
from kvtide.engine.grammars import Grammars, GrammarState, GrammarVocabulary, Mask

VOCAB = 300  # logits beyond the tokenizer's end, as models pad them
EOS = 256
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
TEXT = '{"name": "Ann \\n é", "age": 42}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each byte, the end of text, and two longer ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {"<|end|>": EOS, "na": 257, "nam": 258}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("n", "a"), ("na", "m")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    vocabulary = GrammarVocabulary(folder / "tokenizer.json", VOCAB, (EOS,))
    made = Grammars(vocabulary)
    yield made
    made.close()


def _allowed(mask: Mask) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def _after(state: GrammarState, answer: list[int]) -> set[int]:
    state.prepare(answer)
    return _allowed(state.mask())


def test_a_grammar_allows_each_token_of_an_answer_and_then_its_end(
    grammars: Grammars, tokenizer: Tokenizer
):
    ids: list[int] = tokenizer.encode(TEXT).ids
    state = grammars.state(PERSON)
    for i, token in enumerate(ids):
        allowed = _after(state, ids[:i])
        assert token in allowed
        assert EOS not in allowed
        assert max(allowed) < tokenizer.get_vocab_size()
    # behind its end nothing but ends may follow, for as long as a client wants
    assert _after(state, ids) == {EOS}
    assert _after(state, [*ids, EOS]) == {EOS}
    assert _after(state, [*ids, EOS, EOS]) == {EOS}


def test_a_state_is_the_same_however_it_came_there(
    grammars: Grammars, tokenizer: Tokenizer
):
    """Token by token, replayed at once after a fail-over, or gone back."""
    ids: list[int] = tokenizer.encode(TEXT).ids
    stepped = grammars.state(PERSON)
    back = grammars.state(PERSON)
    for end in range(len(ids) + 1):
        replayed = grammars.state(PERSON)
        expected = _after(stepped, ids[:end])
        assert _after(replayed, ids[:end]) == expected
        _after(back, ids)
        assert _after(back, ids[:end]) == expected


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(GrammarKind.REGEX, r"[a-c]{2}-\d+"), "ab-7"),
        (Grammar(GrammarKind.LARK, 'start: "x" start | "y"'), "xxy"),
        (choice_grammar(('say "no"', "ja\n\\", "é")), "ja\n\\"),
        (choice_grammar(('say "no"', "ja\n\\", "é")), 'say "no"'),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": [1, "a"]}'), '"a"'),
        (Grammar(GrammarKind.JSON_SCHEMA, "true"), "[1, null]"),
    ],
)
def test_each_kind_of_grammar_takes_what_matches(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str
):
    check_grammar(grammar)
    ids: list[int] = tokenizer.encode(text).ids

    assert EOS in _after(grammars.state(grammar), ids)
    state = grammars.state(grammar)
    state.prepare(tokenizer.encode("?" + text).ids)
    with pytest.raises(GrammarFailed):
        state.mask()


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json_schema", "{", "no JSON"),
        ("json_schema", "[]", "no JSON object"),
        ("json_schema", '{"type": "nope"}', "nope"),
        ("json_schema", '{"not": {}}', "Unimplemented"),
        ("json_schema", '{"$ref": "#/x"}', "/x"),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "Unsat"),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: foo", "foo"),
        ("lark", 'x: "a"', "start"),
        ("regex", "a" * (MAX_SOURCE_CHARS + 1), "characters"),
    ],
)
def test_what_no_answer_can_be_held_to_is_refused(kind: str, source: str, reason: str):
    with pytest.raises(InvalidGrammar, match=reason) as caught:
        check_grammar(Grammar(GrammarKind(kind), source))

    assert caught.value.kind == kind
    assert len(str(caught.value)) < 1000


def test_a_clients_own_options_do_not_count(grammars: Grammars, tokenizer: Tokenizer):
    """White space without end is what a small model falls into."""
    schema = SCHEMA | {"x-guidance": {"whitespace_flexible": True}}
    state = grammars.state(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    space = tokenizer.encode(" ").ids[0]

    assert space not in _after(state, tokenizer.encode("{").ids)


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path):
    grammars = Grammars(GrammarVocabulary(tmp_path / "tokenizer.json", 10, ()))
    state = grammars.state(PERSON)
    state.prepare([])
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        state.mask()
    grammars.close()
