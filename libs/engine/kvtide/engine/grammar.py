"""What an answer must look like, as llguidance understands it; imports no torch.

Gateways check a grammar with the limits that workers compile it with, so what passes
here compiles there.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from llguidance import LLMatcher, LLParserLimits

from kvtide.engine.errors import InvalidGrammar

MAX_SOURCE_CHARS: Final = 64 * 1024
"""Longer sources are refused unseen: they travel with every attempt's work."""

# one separator after each comma and colon, and no other white space between tokens: a
# small model that may write white space for ever does
_JSON: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_MAX_ERROR_CHARS = 500


class GrammarKind(StrEnum):
    """The languages that a grammar can be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer must match.

    ``source`` is a JSON schema as JSON text, a regular expression (no look-around), or
    a grammar in llguidance's dialect of Lark whose first rule is ``start``.
    """

    kind: GrammarKind
    source: str


def parser_limits() -> LLParserLimits:
    """What one grammar may cost: a tenth of a second to build, some ms a token.

    ``verbose_errors`` is off: they would hold the client's schema.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def compiled(grammar: Grammar) -> str:
    """The grammar in llguidance's own form, unchecked.

    Raises:
        InvalidGrammar: it is too long, or a schema is no JSON object.
    """
    if len(grammar.source) > MAX_SOURCE_CHARS:
        reason = f"it has {len(grammar.source)} characters, at most"
        raise InvalidGrammar(grammar.kind, f"{reason} {MAX_SOURCE_CHARS} are taken")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _of_schema(grammar.source)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)


def check_grammar(grammar: Grammar) -> None:
    """Refuse what no worker could hold an answer to; blocking, some milliseconds.

    Raises:
        InvalidGrammar: it is wrong, too costly, or uses what is not implemented.
    """
    reason = LLMatcher.validate_grammar(compiled(grammar), limits=parser_limits())
    if reason and not reason.startswith("WARNING"):
        raise InvalidGrammar(grammar.kind, reason.strip()[:_MAX_ERROR_CHARS])


def _of_schema(source: str) -> str:
    kind = GrammarKind.JSON_SCHEMA
    try:
        schema = json.loads(source)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidGrammar(kind, "it is no JSON object")
        # a client's own x-guidance could ask for what is not checked here
        schema.pop("x-guidance", None)
        source = json.dumps(schema)
        return LLMatcher.grammar_from_json_schema(source, overrides=_JSON)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise InvalidGrammar(kind, f"it is no JSON ({error})") from error
    except RecursionError as error:
        raise InvalidGrammar(kind, "it is nested too deeply") from error


def choice_grammar(choices: tuple[str, ...]) -> Grammar:
    """The answer is one of these strings.

    JSON's escapes are Lark's too.
    """
    alternatives = " | ".join(json.dumps(choice) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {alternatives}\n")
