# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
"""What vLLM is asked for, and what it says, in kvtide's words."""

from typing import Any, Final

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from kvtide.bus.messages import GrammarLanguage, GrammarSpec, TokenLogprobs
from kvtide.engine.errors import UnsupportedOption
from kvtide.engine.serving import Ask

ENGINE: Final = "vLLM"
_GOLDEN: Final = 0x9E3779B97F4A7C15
_SILVER: Final = 0xBF58476D1CE4E5B9
_SEEDS: Final = (1 << 63) - 1


def params_of(ask: Ask, transfer: dict[str, Any] | None = None) -> SamplingParams:
    """The request's options, with ``kv_transfer_params`` if there are any.

    Raises:
        UnsupportedOption: vLLM would do something else than what was asked.
    """
    spec = ask.sampling
    if ask.answered:
        _check_goes_on(ask)
    grammar = _grammar(spec.grammar)
    try:
        return SamplingParams(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            min_p=spec.min_p,
            seed=_seed(ask),
            repetition_penalty=spec.repetition_penalty,
            presence_penalty=spec.presence_penalty,
            frequency_penalty=spec.frequency_penalty,
            logit_bias=dict(spec.logit_bias) or None,
            logprobs=spec.logprobs,
            structured_outputs=grammar,
            stop_token_ids=list(ask.stop_ids),
            # an answer's ends are all among the stop ids, or it shall have none
            ignore_eos=True,
            min_tokens=min(ask.min_tokens, ask.max_tokens),
            max_tokens=ask.max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
    except (VLLMClientError, ValueError) as error:
        raise UnsupportedOption(ENGINE, "sampling", str(error)) from error


def _seed(ask: Ask) -> int:
    """One of its own for each choice, and for each attempt that goes on.

    vLLM counts draws from the request's start: an answer that goes on would repeat those
    that it began with.
    """
    mixed = ask.sampling.seed ^ (ask.sampling.choice * _GOLDEN)
    return (mixed + ask.answered * _SILVER) & _SEEDS


def logprobs_of(output: Any) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of a piece; none if they were not asked for."""
    if output.logprobs is None:
        return ()
    told: list[TokenLogprobs] = []
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        ranked = sorted(found.items(), key=lambda pair: pair[1].rank or 0)
        top = tuple((int(key), float(one.logprob)) for key, one in ranked)
        told.append(TokenLogprobs(float(found[token].logprob), top))
    return tuple(told)


def _check_goes_on(ask: Ask) -> None:
    """Refuse what depends on tokens of the answer that vLLM takes for the prompt's."""
    spec = ask.sampling
    reason = "it can't go on with an answer that a lost worker began; ask anew"
    if spec.grammar is not None:
        raise UnsupportedOption(ENGINE, "a grammar", reason)
    if spec.presence_penalty or spec.frequency_penalty:
        raise UnsupportedOption(
            ENGINE, "presence_penalty and frequency_penalty", reason
        )


def _grammar(grammar: GrammarSpec | None) -> StructuredOutputsParams | None:
    if grammar is None:
        return None
    match grammar.language:
        case GrammarLanguage.JSON_SCHEMA:
            return StructuredOutputsParams(json=grammar.source)
        case GrammarLanguage.REGEX:
            return StructuredOutputsParams(regex=grammar.source)
        case GrammarLanguage.LARK:
            raise UnsupportedOption(
                ENGINE, "a Lark grammar", "use a JSON schema or a regular expression"
            )
