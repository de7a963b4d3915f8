"""How a request is put to an engine, and what its stream says. Pure.

vLLM is asked at its OpenAI door with token ids, SGLang at its own (its OpenAI door gives
no token ids back). Both stream server-sent events, one JSON object each.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Protocol

import msgspec

from kvtide.bus.messages import (
    DecodeWork,
    FinishReason,
    GrammarLanguage,
    RefuseCode,
    TokenLogprobs,
)
from kvtide.router.answer import Delta
from kvtide.router.errors import EngineAnswerError

_SEED_MASK = (1 << 63) - 1
_TOKEN_PREFIX = "token_id:"  # noqa: S105 - vLLM's word
_DONE = "[DONE]"
_DATA = "data:"


class EngineKind(StrEnum):
    """Whose server it is."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Heard:
    """What one event of a stream says. ``cached_tokens`` if it tells."""

    delta: Delta | None = None
    cached_tokens: int | None = None


class Dialect(Protocol):
    """The words of one kind of engine."""

    path: str

    def body(self, work: DecodeWork, model: str, salt: str) -> dict[str, Any]:
        """The request, as JSON."""
        ...

    def hear(self, data: bytes) -> Heard:
        """One event's JSON.

        Raises:
            EngineAnswerError: it is an error, or can't be read.
        """
        ...


def data_of(line: str) -> str | None:
    """The JSON of a line of server-sent events; None: it has none."""
    if not line.startswith(_DATA):
        return None
    data = line[len(_DATA) :].strip()
    return None if data in {"", _DONE} else data


def seed_of(work: DecodeWork) -> int:
    """A seed of its own for each choice, and for each attempt that goes on.

    An engine counts draws from the request's start: with the same seed, an answer that
    goes on would repeat the draws that it began with.
    """
    begun = len(work.tokens) - work.prompt_tokens
    mixed = work.sampling.seed + work.sampling.choice * 0x9E3779B97F4A7C15
    return (mixed + begun * 0xBF58476D1CE4E5B9) & _SEED_MASK


# ---- vLLM


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] = ()


_MOST_TOKENS = 1 << 32
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_TOKENS)]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[TokenId, ...] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Problem | None = None


class VllmDialect:
    """vLLM's ``/v1/completions``."""

    path = "/v1/completions"

    def body(self, work: DecodeWork, model: str, salt: str) -> dict[str, Any]:
        """See ``Dialect``."""
        given, begun = work.sampling, len(work.tokens) - work.prompt_tokens
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(work.tokens),
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "max_tokens": work.max_new_tokens - begun,
            "min_tokens": max(0, work.min_new_tokens - begun),
            "ignore_eos": work.ignore_eos,
            "stop_token_ids": [] if work.ignore_eos else list(work.stop_token_ids),
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k,
            "min_p": given.min_p,
            "seed": seed_of(work),
            "repetition_penalty": given.repetition_penalty,
            "presence_penalty": given.presence_penalty,
            "frequency_penalty": given.frequency_penalty,
        }
        if given.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in given.logit_bias}
        if given.logprobs is not None:
            body |= {"logprobs": given.logprobs, "return_tokens_as_token_ids": True}
        if given.grammar is not None:
            word = _GRAMMARS[given.grammar.language]
            body["structured_outputs"] = {word: given.grammar.source}
        return body

    def hear(self, data: bytes) -> Heard:
        """See ``Dialect``."""
        chunk = _decoded(data, _Chunk)
        if chunk.error is not None:
            raise EngineAnswerError(chunk.error.message or "the engine failed")
        details = chunk.usage.prompt_tokens_details if chunk.usage else None
        cached = None if details is None else details.cached_tokens
        if not chunk.choices:
            return Heard(None, cached)
        (choice,) = chunk.choices[:1]
        ids = choice.token_ids or ()
        logprobs = () if choice.logprobs is None else _vllm_logprobs(choice.logprobs)
        delta = Delta(ids, logprobs[: len(ids)], finish_of(choice.finish_reason))
        return Heard(delta, cached)


_GRAMMARS = {
    GrammarLanguage.JSON_SCHEMA: "json",
    GrammarLanguage.REGEX: "regex",
    GrammarLanguage.LARK: "grammar",
}


def _vllm_logprobs(said: _Logprobs) -> tuple[TokenLogprobs, ...]:
    tops = said.top_logprobs or (None,) * len(said.tokens)
    found: list[TokenLogprobs] = []
    for own, top in zip(said.token_logprobs, tops, strict=False):
        ranked = sorted((top or {}).items(), key=lambda item: -item[1])
        pairs = tuple((_token(name), logprob) for name, logprob in ranked)
        found.append(TokenLogprobs(own if own is not None else -9999.0, pairs))
    return tuple(found)


def _token(name: str) -> int:
    try:
        token = int(name.removeprefix(_TOKEN_PREFIX))
    except ValueError as error:
        raise EngineAnswerError(f"{name[:80]!r} is no token id") from error
    if not 0 <= token < _MOST_TOKENS:
        raise EngineAnswerError(f"{name[:80]!r} is no token id")
    return token


# ---- SGLang


class _Reason(msgspec.Struct, frozen=True):
    type: str = ""


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Reason | None = None
    cached_tokens: Count | None = None
    completion_tokens: Count = 0


class _Generated(msgspec.Struct, frozen=True):
    output_ids: tuple[TokenId, ...] = ()
    meta_info: _Meta | None = None
    error: _Problem | None = None


class SglangDialect:
    """SGLang's ``/generate``. One for each stream: it counts what it has heard."""

    path = "/generate"

    def __init__(self) -> None:
        """At a stream's start."""
        self._heard = 0

    def body(self, work: DecodeWork, model: str, salt: str) -> dict[str, Any]:
        """See ``Dialect``; the server has one model.

        Raises:
            EngineAnswerError: SGLang has no such option.
        """
        del model
        given, begun = work.sampling, len(work.tokens) - work.prompt_tokens
        lark = GrammarLanguage.LARK
        if given.grammar is not None and given.grammar.language is lark:
            raise EngineAnswerError(
                "SGLang takes no Lark grammar: use a JSON schema or a regular expression",
                code=RefuseCode.UNSUPPORTED,
            )
        if given.logprobs is not None:
            raise EngineAnswerError(
                "log-probabilities can't be had of SGLang: leave them out",
                code=RefuseCode.UNSUPPORTED,
            )
        sampling: dict[str, Any] = {
            "max_new_tokens": work.max_new_tokens - begun,
            "min_new_tokens": max(0, work.min_new_tokens - begun),
            "ignore_eos": work.ignore_eos,
            "stop_token_ids": [] if work.ignore_eos else list(work.stop_token_ids),
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k or -1,
            "min_p": given.min_p,
            "sampling_seed": seed_of(work),
            "repetition_penalty": given.repetition_penalty,
            "presence_penalty": given.presence_penalty,
            "frequency_penalty": given.frequency_penalty,
        }
        if given.logit_bias:
            sampling["logit_bias"] = {str(t): bias for t, bias in given.logit_bias}
        if given.grammar is not None:
            name = _GRAMMARS[given.grammar.language]
            sampling["json_schema" if name == "json" else name] = given.grammar.source
        return {
            "input_ids": list(work.tokens),
            "sampling_params": sampling,
            "cache_salt": salt,
            "stream": True,
        }

    def hear(self, data: bytes) -> Heard:
        """See ``Dialect``. ``output_ids`` are all so far, or only the new ones."""
        said = _decoded(data, _Generated)
        if said.error is not None:
            raise EngineAnswerError(said.error.message or "the engine failed")
        meta = said.meta_info or _Meta()
        new = max(0, meta.completion_tokens - self._heard)
        ids = said.output_ids[-new:] if new else ()
        self._heard += len(ids)
        reason = meta.finish_reason.type if meta.finish_reason else None
        return Heard(Delta(ids, (), finish_of(reason)), meta.cached_tokens)


def finish_of(reason: str | None) -> FinishReason | None:
    """An engine's word for an end.

    Raises:
        EngineAnswerError: the engine gave up.
    """
    if not reason:
        return None
    try:
        return FinishReason(reason)
    except ValueError as error:
        raise EngineAnswerError(f"the engine ended it: {reason}") from error


def _decoded(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineAnswerError(f"the engine's answer can't be read: {error}") from None


def dialect_of(kind: EngineKind) -> Dialect:
    """The words for one stream."""
    return VllmDialect() if kind is EngineKind.VLLM else SglangDialect()
