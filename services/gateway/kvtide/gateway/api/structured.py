"""What a client says that an answer must look like, as one grammar.

OpenAI's ``response_format`` and the names that vLLM has for the same.
"""

import json
from collections.abc import Iterator
from typing import Any

from kvtide.engine.grammar import Grammar, GrammarKind, choice_grammar
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.schemas import (
    GenerationBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from kvtide.gateway.api.wanted import Held

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def held_of(body: GenerationBody) -> Held | None:
    """What the body's fields say that the answer looks like; None if nothing.

    Raises:
        ApiError: 400 that names the field: two are given.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        first, second, *_ = asked
        raise bad_param(second.param, f"give either {first.param} or {second.param}")
    return asked[0] if asked else None


def _asked(body: GenerationBody) -> Iterator[Held]:
    match body.response_format:
        case JsonObjectFormat():
            yield Held("response_format", ANY_OBJECT)
        case JsonSchemaFormat(json_schema=wanted):
            schema = {"type": "object"} if wanted.schema_ is None else wanted.schema_
            yield Held("response_format", of_schema(schema))
        case _:
            pass
    if body.guided_json is not None:
        yield Held("guided_json", of_schema(body.guided_json))
    for param, regex in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if regex is not None:
            yield Held(param, Grammar(GrammarKind.REGEX, regex))
    for param, lark in (
        ("guided_grammar", body.guided_grammar),
        ("grammar", body.grammar),
    ):
        if lark is not None:
            yield Held(param, Grammar(GrammarKind.LARK, lark))
    if body.guided_choice is not None:
        yield Held("guided_choice", choice_grammar(tuple(body.guided_choice)))
    if body.structured_outputs is not None:
        yield from _structured(body.structured_outputs)


def _structured(asked: StructuredOutputs) -> Iterator[Held]:
    if asked.json_ is not None:
        yield Held("structured_outputs.json", of_schema(asked.json_))
    if asked.regex is not None:
        yield Held("structured_outputs.regex", Grammar(GrammarKind.REGEX, asked.regex))
    if asked.grammar is not None:
        yield Held(
            "structured_outputs.grammar", Grammar(GrammarKind.LARK, asked.grammar)
        )
    if asked.choice is not None:
        yield Held("structured_outputs.choice", choice_grammar(tuple(asked.choice)))
    if asked.json_object:
        yield Held("structured_outputs.json_object", ANY_OBJECT)


def of_schema(schema: str | dict[str, Any]) -> Grammar:
    """A schema comes as JSON, or as text that holds JSON."""
    source = schema if isinstance(schema, str) else json.dumps(schema)
    return Grammar(GrammarKind.JSON_SCHEMA, source)
