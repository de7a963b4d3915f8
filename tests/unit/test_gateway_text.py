"""Tokens to text and stop strings, for every way that they can fall."""

import functools
import itertools
import json

import pytest
from hypothesis import given, settings, strategies as st
from tests.unit.gateway_models import byte_level, sentence_piece
from tokenizers import Tokenizer

from kvtide.gateway.errors import ModelTextError
from kvtide.gateway.text import AnswerText, Detokenizer, StopStrings, TokenBytes

BYTE_LEVEL = functools.cache(byte_level)
SENTENCE_PIECE = functools.cache(sentence_piece)
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
WILD = st.text(alphabet="aé日本🌊👩‍👩‍👧\n ▁Ġ�", max_size=40)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=100, deadline=None)
@given(TEXT | WILD)
def test_byte_level_pieces_join_to_the_text(text: str) -> None:
    tokenizer = BYTE_LEVEL()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    if "�" not in text:
        assert not any("�" in part for part in parts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=40))
def test_any_byte_level_ids_decode_as_the_whole(ids: list[int]) -> None:
    tokenizer = BYTE_LEVEL()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(TEXT | WILD)
def test_byte_fallback_pieces_join_to_the_text(text: str) -> None:
    tokenizer = SENTENCE_PIECE()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    # the first token keeps its space: an answer goes on behind a prompt
    expected = " " + text if text else ""
    assert "".join(pieces(tokenizer, ids)) == expected.replace("▁", " ")


def test_special_tokens_have_no_text_and_unknown_ids_none() -> None:
    tokenizer = BYTE_LEVEL()
    table = TokenBytes(tokenizer)
    ids = tokenizer.encode("<|im_end|><tool_call>").ids
    assert [table.of(i) for i in ids] == [b"", b"<tool_call>"]
    assert table.of(10**6) == b""


def test_a_character_appears_only_when_it_is_whole() -> None:
    tokenizer = BYTE_LEVEL()
    bytes_of = {TokenBytes(tokenizer).of(i): i for i in range(600)}
    wave = [bytes_of[bytes((byte,))] for byte in "🌊".encode()]
    assert pieces(tokenizer, wave) == ["", "", "", "🌊", ""]
    assert pieces(tokenizer, wave[:2]) == ["", "", "�"]


def test_another_decoder_is_refused_by_name() -> None:
    raw = json.loads(BYTE_LEVEL().to_str())
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ModelTextError, match="WordPiece"):
        TokenBytes(Tokenizer.from_str(json.dumps(raw)))
    raw["decoder"] = None
    with pytest.raises(ModelTextError, match="no decoder"):
        TokenBytes(Tokenizer.from_str(json.dumps(raw)))


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a stop string leaves of ``text``: the plain definition."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return text, None
    _, start, stop = min(found)
    return text[:start], stop


SMALL = st.text(alphabet="abé🌊", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🌊", min_size=1, max_size=4), max_size=4)


@settings(max_examples=100, deadline=None)
@given(SMALL, STOPS, st.lists(st.integers(0, 30)))
def test_stops_do_not_depend_on_how_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, stop = whole(text, stops)
    finder = StopStrings(stops)
    edges = [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    sent = ""
    for start, end in itertools.pairwise(edges):
        sent += finder.push(text[start:end])
        assert expected.startswith(sent)
        # nothing is held longer than it must be
        if finder.hit is None:
            held = text[len(sent) : end]
            assert held == "" or any(s.startswith(held) and s != held for s in stops)
    if finder.hit is None:
        sent += finder.flush()
    assert (sent, finder.hit) == (expected, stop)


@settings(max_examples=100, deadline=None)
@given(WILD, st.lists(st.sampled_from(["日", "本🌊", "\n ", "a"]), max_size=2))
def test_an_answer_stops_the_same_token_by_token(text: str, stops: list[str]) -> None:
    tokenizer = BYTE_LEVEL()
    answer = AnswerText(TokenBytes(tokenizer), stops)
    sent = ""
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        sent += answer.push(token)
        if answer.hit:
            break
    else:
        sent += answer.finish()
    assert sent == whole(text, stops)[0]


def test_the_first_min_tokens_are_not_searched() -> None:
    tokenizer = BYTE_LEVEL()
    a = tokenizer.encode("a").ids[0]
    answer = AnswerText(TokenBytes(tokenizer), ["a"], min_tokens=2)
    assert [answer.push(a) for _ in range(3)] == ["a", "a", ""]
    assert answer.hit
