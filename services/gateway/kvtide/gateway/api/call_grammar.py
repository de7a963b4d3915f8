"""Grammars that hold an answer to its tools' calls, in llguidance's dialect of Lark.

Calls are written as the model's chat template taught it, arguments follow each tool's
schema. Where an answer may also be text, the text is free up to the tag of a call.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.engine.errors import InvalidGrammar
from kvtide.engine.grammar import (
    MAX_SOURCE_CHARS,
    Grammar,
    GrammarKind,
    check_grammar,
)
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.tools import Tool, ToolUse
from kvtide.gateway.reading import (
    THINK_END,
    THINK_START,
    CallFormat,
    Thinking,
)
from kvtide.gateway.reading.hermes import CALL_END, CALL_START

_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_HEAD = "%llguidance {}\n"
_TEXT = "TEXT: /(.|\\n)*/\nGAP: /[ \\n]{0,4}/\n"


@dataclass(frozen=True, slots=True)
class Tongue:
    """How the served model writes.

    ``is_token``: whether a tag is a token of its own, which a grammar must name.
    """

    form: CallFormat
    thinking: Thinking | None
    is_token: Callable[[str], bool]

    def tag(self, name: str) -> str:
        """A tag as Lark has it."""
        return name if self.is_token(name) else json.dumps(name)

    def up_to(self, rule: str, tag: str) -> str:
        """A rule: free text that ends with ``tag``."""
        lazy = "" if self.is_token(tag) else "[lazy]"
        return f"{rule}{lazy}: TEXT {self.tag(tag)}\n"


def call_grammar(use: ToolUse, tongue: Tongue, other: Grammar | None) -> Grammar | None:
    """What an answer that may call is held to; ``other``: what it is if it doesn't.

    None: free text, in which no call has a mark of its own. Blocking, some ms.

    Raises:
        ApiError: 400 that names a strict tool whose schema can't be held to.
    """
    if tongue.form is CallFormat.LLAMA and not use.must and other is None:
        return None
    tools = use.callable
    grammar = _grammar(use, tools, tongue, other)
    if _is_held(grammar):
        return grammar
    loose = tuple(_loosened(number, tool) for number, tool in enumerate(tools))
    grammar = _grammar(use, loose, tongue, other)
    if len(grammar.source) > MAX_SOURCE_CHARS or not _is_held(grammar):
        strictless = tuple(Tool(tool.name) for tool in tools)
        grammar = _grammar(use, strictless, tongue, other)
    return grammar


def thoughtful(grammar: Grammar, tongue: Tongue) -> Grammar:
    """``grammar`` for an answer that may begin with reasoning."""
    if tongue.thinking is None:
        return grammar
    rules = f"{_HEAD}{_start(tongue)}body: answer\n{_answer(grammar)}{_TEXT}"
    return Grammar(GrammarKind.LARK, rules)


def _is_held(grammar: Grammar) -> bool:
    try:
        check_grammar(grammar)
    except InvalidGrammar:
        return False
    return True


def _loosened(number: int, tool: Tool) -> Tool:
    """The tool with any arguments, if its schema can't be held to."""
    try:
        source = json.dumps(_schema(tool))
        check_grammar(Grammar(GrammarKind.JSON_SCHEMA, source))
    except InvalidGrammar as error:
        if tool.strict:
            param = f"tools[{number}]"
            raise bad_param(
                param, f"{param}: {error}", code="invalid_function_parameters"
            ) from error
        return Tool(tool.name)
    return tool


def _schema(tool: Tool) -> dict[str, Any]:
    schema = dict(tool.parameters) or dict(_ANY_ARGUMENTS)
    schema.setdefault("type", "object")
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _grammar(
    use: ToolUse, tools: Sequence[Tool], tongue: Tongue, other: Grammar | None
) -> Grammar:
    rules = _HEAD + _start(tongue)
    match tongue.form:
        case CallFormat.HERMES:
            rules += _hermes(use, tongue, other)
        case CallFormat.LLAMA:
            rules += _llama(use, other)
    if other is not None:
        rules += _answer(other)
    key = "arguments" if tongue.form is CallFormat.HERMES else "parameters"
    rules += "json: " + " | ".join(f"json_{i}" for i in range(len(tools))) + "\n"
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        schema = json.dumps(_schema(tool) | {"x-guidance": _JSON})
        rules += f'json_{number}: {json.dumps(head)} %json {schema} "}}"\n'
    return Grammar(GrammarKind.LARK, rules + _TEXT)


def _start(tongue: Tongue) -> str:
    match tongue.thinking:
        case None:
            return "start: body\n"
        case Thinking(begun=True):
            start = "start: thought GAP body\n"
        case Thinking():
            start = "start: thoughts? body\n"
            start += f"thoughts: {tongue.tag(THINK_START)} thought GAP\n"
    return start + tongue.up_to("thought", THINK_END)


def _hermes(use: ToolUse, tongue: Tongue, other: Grammar | None) -> str:
    rules = f'call: {tongue.tag(CALL_START)} inside\ninside: "\\n" json "\\n" '
    rules += f"{tongue.tag(CALL_END)}\n"
    calls = 'call ("\\n" call)*' if use.many else "call"
    if use.must:
        return f"{rules}body: {calls}\n"
    if other is not None:
        return f"{rules}body: {calls} | answer\n"
    rules += tongue.up_to("lead", CALL_START) + "free: lead inside\nrest: TEXT\n"
    return rules + ("body: free* rest\n" if use.many else "body: free | rest\n")


def _llama(use: ToolUse, other: Grammar | None) -> str:
    calls = 'json ("; " json)*' if use.many else "json"
    if use.must or other is None:
        return f"body: {calls}\n"
    return f"body: {calls} | answer\n"


def _answer(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema: dict[str, Any] | bool = json.loads(grammar.source)
            held = {**(schema if isinstance(schema, dict) else {}), "x-guidance": _JSON}
            return f"answer: %json {json.dumps(held)}\n"
        case GrammarKind.REGEX:
            return f"answer: /{grammar.source.replace('/', chr(92) + '/')}/\n"
        case GrammarKind.LARK:
            return f"answer: %lark {{\n{grammar.source}\n}}\n"
