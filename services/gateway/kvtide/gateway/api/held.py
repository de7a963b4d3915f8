"""The one grammar that an answer is held to, checked before any work."""

import asyncio

from kvtide.bus.messages import GrammarLanguage, GrammarSpec
from kvtide.engine.errors import InvalidGrammar
from kvtide.engine.grammar import Grammar, check_grammar
from kvtide.gateway.api.call_grammar import Tongue, call_grammar, thoughtful
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.wanted import Wanted

CHECK_LIMIT_S = 10.0


async def grammar_of(wanted: Wanted, tongue: Tongue) -> GrammarSpec | None:
    """What the answer must match; None if it is free.

    Raises:
        ApiError: 400 that names the field: a grammar or a schema that can't be used.
    """
    param = wanted.held.param if wanted.held is not None else "tools"
    if wanted.held is None and not wanted.tools.tools:
        return None
    if wanted.ends.ignore_eos:
        if wanted.held is None and not wanted.tools.must:
            return None
        raise bad_param(
            "ignore_eos", f"ignore_eos: an answer held to {param} ends where that ends"
        )
    try:
        async with asyncio.timeout(CHECK_LIMIT_S):
            grammar = await asyncio.to_thread(_made, wanted, tongue)
    except InvalidGrammar as error:
        raise bad_param(param, f"{param}: {error}", code="invalid_grammar") from error
    except TimeoutError as error:
        reason = "takes too long to check"
        raise bad_param(param, f"{param}: {reason}", code="invalid_grammar") from error
    if grammar is None:
        return None
    return GrammarSpec(GrammarLanguage(grammar.kind.value), grammar.source)


def _made(wanted: Wanted, tongue: Tongue) -> Grammar | None:
    other = wanted.held.grammar if wanted.held is not None else None
    if other is not None:
        check_grammar(other)
    if wanted.tools.tools:
        return call_grammar(wanted.tools, tongue, other)
    return thoughtful(other, tongue) if other is not None else None
