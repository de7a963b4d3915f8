"""What a client says that an answer must look like, as one checked grammar.

OpenAI's ``response_format`` and the names that vLLM has for the same.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from kvtide.bus.messages import GrammarLanguage, GrammarSpec
from kvtide.engine.errors import InvalidGrammar
from kvtide.engine.grammar import Grammar, GrammarKind, check_grammar, choice_grammar
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.schemas import (
    GenerationBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)

CHECK_LIMIT_S = 10.0

_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')

Named = tuple[str, Grammar]
"""A grammar and the field that asked for it."""


async def grammar_of(body: GenerationBody) -> GrammarSpec | None:
    """The grammar that the answer is held to; None if it is free.

    Raises:
        ApiError: 400 that names the field: a grammar that can't be used, or two.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    if len(asked) > 1:
        (first, _), (second, _), *_ = asked
        raise bad_param(second, f"give either {first} or {second}")
    [(param, grammar)] = asked
    if body.ignore_eos:
        raise bad_param(
            "ignore_eos", f"ignore_eos: an answer held to {param} ends where that ends"
        )
    try:
        async with asyncio.timeout(CHECK_LIMIT_S):
            await asyncio.to_thread(check_grammar, grammar)
    except InvalidGrammar as error:
        raise bad_param(param, f"{param}: {error}", code="invalid_grammar") from error
    except TimeoutError as error:
        reason = "takes too long to check"
        raise bad_param(param, f"{param}: {reason}", code="invalid_grammar") from error
    return GrammarSpec(GrammarLanguage(grammar.kind.value), grammar.source)


def _asked(body: GenerationBody) -> Iterator[Named]:
    match body.response_format:
        case JsonObjectFormat():
            yield "response_format", _ANY_OBJECT
        case JsonSchemaFormat(json_schema=wanted):
            schema = {"type": "object"} if wanted.schema_ is None else wanted.schema_
            yield "response_format", _schema(schema)
        case _:
            pass
    if body.guided_json is not None:
        yield "guided_json", _schema(body.guided_json)
    for param, regex in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if regex is not None:
            yield param, Grammar(GrammarKind.REGEX, regex)
    for param, lark in (
        ("guided_grammar", body.guided_grammar),
        ("grammar", body.grammar),
    ):
        if lark is not None:
            yield param, Grammar(GrammarKind.LARK, lark)
    if body.guided_choice is not None:
        yield "guided_choice", choice_grammar(tuple(body.guided_choice))
    if body.structured_outputs is not None:
        yield from _structured(body.structured_outputs)


def _structured(asked: StructuredOutputs) -> Iterator[Named]:
    if asked.json_ is not None:
        yield "structured_outputs.json", _schema(asked.json_)
    if asked.regex is not None:
        yield "structured_outputs.regex", Grammar(GrammarKind.REGEX, asked.regex)
    if asked.grammar is not None:
        yield "structured_outputs.grammar", Grammar(GrammarKind.LARK, asked.grammar)
    if asked.choice is not None:
        yield "structured_outputs.choice", choice_grammar(tuple(asked.choice))
    if asked.json_object:
        yield "structured_outputs.json_object", _ANY_OBJECT


def _schema(schema: str | dict[str, Any]) -> Grammar:
    """A schema comes as JSON, or as text that holds JSON."""
    source = schema if isinstance(schema, str) else json.dumps(schema)
    return Grammar(GrammarKind.JSON_SCHEMA, source)
