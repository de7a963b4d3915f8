"""Reasoning and calls in an answer's text, however it is cut into pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings, strategies as st

from kvtide.gateway.reading import (
    Arguments,
    CallBegun,
    CallFormat,
    Content,
    Part,
    Reasoning,
    Thinking,
    reader_of,
)


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    made: list[Part] = []
    for part in parts:
        match made[-1] if made else None, part:
            case Content(before), Content(text):
                made[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                made[-1] = Reasoning(before + text)
            case Arguments(_, before), Arguments(number, text):
                made[-1] = Arguments(number, before + text)
            case _:
                made.append(part)
    return made


TOOLS = ("get_time", "get_weather")
HERMES, LLAMA = CallFormat.HERMES, CallFormat.LLAMA


def read(
    pieces: list[str],
    form: CallFormat | None = HERMES,
    thinking: Thinking | None = None,
) -> list[Part]:
    reader = reader_of(thinking, form, TOOLS)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined([*parts, *reader.finish()])


def call(name: str, number: int = 0, **arguments: object) -> list[Part]:
    return [CallBegun(number, name), Arguments(number, json.dumps(arguments))]


def written(name: str, **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


BACKWARDS = '<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>'
HERMES_ANSWERS: list[tuple[str, list[Part]]] = [
    ("hello", [Content("hello")]),
    ("a < b <tool", [Content("a < b <tool")]),
    (written("x", a='} ] " \\ </tool_call>'), call("x", a='} ] " \\ </tool_call>')),
    (
        "Let me see.\n" + written("x", a=1) + "\n" + written("y") + "\n",
        [Content("Let me see."), *call("x", 0, a=1), *call("y", 1)],
    ),
    (written("x") + "\n\nDone.", [*call("x"), Content("Done.")]),
    (BACKWARDS, call("x", a=1)),
    (
        '<tool_call>[{"name": "x", "arguments": {"a": 1}}, {"name": "y"}]</tool_call>',
        [*call("x", 0, a=1), *call("y", 1)],
    ),
    ('<tool_call>{"name": "x", "arguments": "{}"}</tool_call>', call("x")),
    ("<tool_call>not JSON</tool_call>", [Content("<tool_call>not JSON</tool_call>")]),
    (
        '<tool_call>{"name": 5}</tool_call>',
        [Content('<tool_call>{"name": 5}</tool_call>')],
    ),
    (BACKWARDS.removesuffix("</tool_call>"), call("x", a=1)),
    (
        '<tool_call>{"name": "x", "arguments": {"a": [1',
        [CallBegun(0, "x"), Arguments(0, '{"a": [1')],
    ),
    ('<tool_call>{"name": "x', [Content('<tool_call>{"name": "x')]),
]
LLAMA_ANSWERS: list[tuple[str, list[Part]]] = [
    ("hello {", [Content("hello {")]),
    ('{"name": "get_time", "parameters": {"a": "}"}}', call("get_time", a="}")),
    (
        (
            '<|python_tag|>{"name": "get_time", "parameters": {}}; '
            '{"name": "get_weather", "parameters": {"a": 1}}'
        ),
        [*call("get_time"), *call("get_weather", 1, a=1)],
    ),
    (
        '{"name": "other", "parameters": {}}',
        [Content('{"name": "other", "parameters": {}}')],
    ),
    ('{"name": "get_time"', [Content('{"name": "get_time"')]),
    ('  {"a": 1}', [Content('  {"a": 1}')]),
    (
        '{"name": "get_time", "parameters": {}}\nDone; ok',
        [*call("get_time"), Content("Done; ok")],
    ),
]


@pytest.mark.parametrize(("text", "parts"), HERMES_ANSWERS)
def test_calls_of_hermes_are_found(text: str, parts: list[Part]) -> None:
    assert read([text]) == parts
    assert read(list(text)) == parts


@pytest.mark.parametrize(("text", "parts"), LLAMA_ANSWERS)
def test_calls_of_llama_are_found(text: str, parts: list[Part]) -> None:
    assert read([text], LLAMA) == parts
    assert read(list(text), LLAMA) == parts


THOUGHTS: list[tuple[str, bool, list[Part]]] = [
    ("<think>\nhm\n\n</think>\n\nyes", False, [Reasoning("hm"), Content("yes")]),
    ("hm</think>yes", True, [Reasoning("hm"), Content("yes")]),
    ("yes <think>no</think>", False, [Content("yes <think>no</think>")]),
    ("  <thin", False, [Content("  <thin")]),
    ("<think>a </thin", False, [Reasoning("a </thin")]),
    ("<think>\n</think>\nyes", False, [Content("yes")]),
    (
        "<think>a</think>" + written("x"),
        False,
        [Reasoning("a"), *call("x")],
    ),
]


@pytest.mark.parametrize(("text", "begun", "parts"), THOUGHTS)
def test_reasoning_is_apart(text: str, begun: bool, parts: list[Part]) -> None:
    assert read([text], thinking=Thinking(begun)) == parts
    assert read(list(text), thinking=Thinking(begun)) == parts


def test_arguments_pass_while_they_are_written() -> None:
    reader = reader_of(None, HERMES, TOOLS)
    begun = reader.push('<tool_call>\n{"name": "x", "arguments": {"a": "lo')
    assert begun == [CallBegun(0, "x"), Arguments(0, '{"a": "lo')]
    assert reader.push("ng") == [Arguments(0, "ng")]


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "; "),
    *('{"name": "get_time", "arguments": ', '{"name": "get_time", "parameters": '),
    *('{"a": "b}"}', "{}", "}", "{", '"', "\\", "\n", " ", "x", "é", "<", "</"),
    *('"name"', '{"arguments": {}, "name": "x"}', "[", "]"),
]


@settings(max_examples=300, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    form=st.sampled_from([None, HERMES, LLAMA]),
    thinking=st.sampled_from([None, Thinking(), Thinking(begun=True)]),
)
@example(["<tool_call>", "</tool_call>"], [3], HERMES, None)
def test_the_parts_do_not_depend_on_the_cuts(
    fragments: list[str],
    cuts: list[int],
    form: CallFormat | None,
    thinking: Thinking | None,
) -> None:
    text = "".join(fragments)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = read([text], form, thinking)
    assert read(pieces, form, thinking) == whole
    assert read(list(text), form, thinking) == whole
