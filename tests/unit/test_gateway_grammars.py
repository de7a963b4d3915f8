"""Grammars of calls: what they let through, with tags that are tokens and that aren't."""

# pyright: reportUnknownMemberType=false
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.unit.gateway_models import byte_level
from tokenizers import AddedToken

from kvtide.engine.grammar import Grammar, GrammarKind, check_grammar
from kvtide.gateway.api.call_grammar import Tongue, call_grammar, thoughtful
from kvtide.gateway.api.tools import Tool, ToolUse
from kvtide.gateway.reading import CallFormat, Thinking

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", "", CITY), Tool("time"))
ANY_JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
NO_TOKENS = Tongue(CallFormat.HERMES, None, lambda _: False)


def call(name: str, **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


CALL = call("weather", city="x")


class Vocabulary:
    """A tokenizer in which tags are tokens, or none is."""

    def __init__(self, *tags: str) -> None:
        self.tokenizer = byte_level()
        self.tokenizer.add_tokens([AddedToken(tag, special=True) for tag in tags])
        self.tags = ("<tool_call>", *tags)
        self._tokens = LLTokenizer(self.tokenizer.to_str(), eos_token=[2])

    def tongue(
        self, thinking: Thinking | None = None, form: CallFormat = CallFormat.HERMES
    ) -> Tongue:
        return Tongue(form, thinking, self.tags.__contains__)

    def takes(self, grammar: Grammar | None, text: str) -> bool:
        """Whether ``text`` can be an answer, and a whole one."""
        assert grammar is not None
        check_grammar(grammar)
        assert grammar.kind is GrammarKind.LARK
        source = LLMatcher.grammar_from_lark(grammar.source)
        matcher = LLMatcher(self._tokens, source, log_level=0)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=[(), ("</tool_call>", "<think>", "</think>")])
def words(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(*request.param)


def test_what_must_call_calls(words: Vocabulary) -> None:
    grammar = call_grammar(ToolUse(TOOLS, must=True), words.tongue(), None)
    assert words.takes(grammar, CALL)
    assert words.takes(grammar, f"{CALL}\n{call('time')}")
    for wrong in ("", "hi", f"hi {CALL}", call("weather"), call("other"), CALL[:-3]):
        assert not words.takes(grammar, wrong)


def test_what_may_call_is_free_until_it_calls(words: Vocabulary) -> None:
    grammar = call_grammar(ToolUse(TOOLS), words.tongue(), None)
    for right in ("", "hi", f"hi {CALL}", f"{CALL}\n{call('time')} bye"):
        assert words.takes(grammar, right)
    for wrong in (call("weather"), "<tool_call>\nhi", f"hi {call('other')}"):
        assert not words.takes(grammar, wrong)


def test_one_call_is_one(words: Vocabulary) -> None:
    once = call_grammar(ToolUse(TOOLS, parallel=False), words.tongue(), None)
    assert words.takes(once, f"hi {CALL}")
    assert words.takes(once, "hi")
    assert not words.takes(once, f"{CALL}\n{CALL}")
    named = ToolUse(TOOLS, must=True, only="time")
    grammar = call_grammar(named, words.tongue(), None)
    assert words.takes(grammar, call("time"))
    assert not words.takes(grammar, CALL)
    assert not words.takes(grammar, f"{call('time')}\n{call('time')}")


def test_calls_or_json(words: Vocabulary) -> None:
    grammar = call_grammar(ToolUse(TOOLS), words.tongue(), ANY_JSON)
    assert words.takes(grammar, CALL)
    assert words.takes(grammar, '{"a": 1}')
    assert not words.takes(grammar, "hi")


def test_llamas_calls_are_bare(words: Vocabulary) -> None:
    tongue = words.tongue(form=CallFormat.LLAMA)
    grammar = call_grammar(ToolUse(TOOLS, must=True), tongue, None)
    first = '{"name": "weather", "parameters": {"city": "x"}}'
    assert words.takes(grammar, first)
    assert words.takes(grammar, first + '; {"name": "time", "parameters": {}}')
    assert not words.takes(grammar, '{"name": "weather", "parameters": {}}')
    assert call_grammar(ToolUse(TOOLS), tongue, None) is None


OTHERS = [
    (ANY_JSON, '{"a": 1}'),
    (Grammar(GrammarKind.REGEX, "a/b|c"), "a/b"),
    (Grammar(GrammarKind.LARK, 'start: "{" x\nx: "y"'), "{y"),
]


def test_reasoning_comes_first(words: Vocabulary) -> None:
    begun, free = words.tongue(Thinking(begun=True)), words.tongue(Thinking())
    use = ToolUse(TOOLS, must=True)
    for grammar, text in (
        *((call_grammar(use, tongue, None), CALL) for tongue in (begun,)),
        *((thoughtful(other, begun), text) for other, text in OTHERS),
    ):
        assert words.takes(grammar, f"hm</think>\n\n{text}")
        assert not words.takes(grammar, text)
        assert not words.takes(grammar, "hm</think>\n\n hi")
    for grammar, text in (
        (call_grammar(use, free, None), CALL),
        *((thoughtful(other, free), text) for other, text in OTHERS),
    ):
        assert words.takes(grammar, f"<think>\nhm\n</think>\n\n{text}")
        assert words.takes(grammar, text)
        assert not words.takes(grammar, "<think>\nhm\n</think>")


def test_many_large_schemas_are_held_loosely() -> None:
    properties = {f"p{i}": {"type": "string", "enum": ["x" * 50]} for i in range(99)}
    schema = {"type": "object", "properties": properties}
    tools = tuple(Tool(f"tool{i}", "", schema) for i in range(40))
    grammar = call_grammar(ToolUse(tools, must=True), NO_TOKENS, None)
    assert grammar is not None
    check_grammar(grammar)
    assert "tool39" in grammar.source
