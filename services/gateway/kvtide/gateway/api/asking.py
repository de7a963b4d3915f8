"""From a client's parameters to what is asked of the workers. Every number is checked."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.bus.messages import GrammarSpec, SamplingSpec
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.problems import ApiError, bad_param
from kvtide.gateway.api.refusals import refuse_unserved
from kvtide.gateway.api.schemas import ChatBody, CompletionBody, GenerationBody
from kvtide.gateway.api.structured import grammar_of
from kvtide.gateway.api.wishes import Wishes
from kvtide.gateway.life import RequestSpec
from kvtide.kv import KeySpace, ModelFacts, RequestId, TenantId, answer_name

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Question:
    """One answer that is to be made: number ``index`` of the client's request."""

    index: int
    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class Questions:
    """All answers to one client's request, ready to be submitted.

    ``per_prompt`` answers in a row share a prompt.
    """

    items: tuple[Question, ...]
    space: KeySpace
    stops: tuple[str, ...]
    per_prompt: int


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an answer."""

    stops: tuple[str, ...]
    token_ids: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool


def check_body(door: Door, body: GenerationBody, prompts: int) -> None:
    """What can be said before the prompt is tokenised.

    Raises:
        ApiError: an unknown model, an unserved parameter, too many answers.
        UnavailableError: no room for that many more requests.
    """
    door.check_model(body.model)
    refuse_unserved(body.model_extra or {})
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise bad_param("top_logprobs", "top_logprobs is for logprobs: true")
    count = prompts * (body.n or 1)
    if count > door.settings.max_choices:
        raise bad_param(
            "n" if (body.n or 1) > 1 else "prompt",
            f"{count} answers were asked for; at most {door.settings.max_choices} are "
            "made per request",
        )
    door.gateway.check_room(count)


def ends_of(door: Door, body: GenerationBody) -> Ends:
    """Stop strings and lengths.

    Raises:
        ApiError: 400 that names the field.
    """
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    ids = tuple(body.stop_token_ids or ())
    settings = door.settings
    for param, given in (("stop", stops), ("stop_token_ids", ids)):
        if len(given) > settings.max_stops:
            raise bad_param(param, f"{param}: at most {settings.max_stops} are allowed")
    if any(not stop or len(stop) > settings.max_stop_chars for stop in stops):
        raise bad_param(
            "stop", f"stop: each must have 1 to {settings.max_stop_chars} characters"
        )
    _, limit = _max_tokens(body)
    return Ends(stops, ids, limit, body.min_tokens or 0, bool(body.ignore_eos))


async def questions_of(
    door: Door,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    *,
    param: str,
    request_id: RequestId,
    wishes: Wishes,
) -> Questions:
    """Everything that the workers are asked for the prompts' ids.

    Raises:
        ApiError: 400 that names the field; ``param`` is the prompts' own.
        UnavailableError: the model is not ready.
    """
    facts = door.served.facts()
    ends = ends_of(door, body)
    bias = _logit_bias(body, facts)
    grammar = await grammar_of(body)
    tenant = TenantId(door.settings.tenant)
    space = door.served.space(tenant, facts, body.cache_salt or "")
    count = body.n or 1
    seed = body.seed if body.seed is not None else secrets.randbits(63)
    items: list[Question] = []
    for ids in prompts:
        _check_ids(ids, facts, param)
        limit = _room(door, body, len(ids), facts, param)
        if ends.min_tokens > limit:
            raise bad_param("min_tokens", f"min_tokens is more than {limit}")
        prompt = await door.served.prompt(ids, space)
        for _ in range(count):
            index = len(items)
            spec = RequestSpec(
                request=answer_name(request_id, index),
                gateway=door.gateway.node.ref,
                tenant=tenant,
                salt=body.cache_salt or "",
                model=facts.name,
                prompt=prompt.ids,
                keys=prompt.keys,
                sampling=_sampling(body, Draws(seed, index, bias, grammar)),
                max_new_tokens=limit,
                min_new_tokens=ends.min_tokens,
                stop_token_ids=_stop_ids(ends, facts),
                ignore_eos=ends.ignore_eos,
                ttft_ms=wishes.ttft_ms,
                tbt_ms=wishes.tbt_ms,
                priority=_priority(body, wishes),
            )
            items.append(Question(index, spec))
    return Questions(tuple(items), space, ends.stops, count)


def _priority(body: GenerationBody, wishes: Wishes) -> int:
    """The body is the client's own word; a header may come from a proxy."""
    given = body.priority if body.priority is not None else wishes.priority
    return given or 0


@dataclass(frozen=True, slots=True)
class Draws:
    """What decides an answer's tokens beside the numbers in the body."""

    seed: int
    choice: int
    bias: tuple[tuple[int, float], ...]
    grammar: GrammarSpec | None


def _sampling(body: GenerationBody, draws: Draws) -> SamplingSpec:
    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    return SamplingSpec(
        temperature=given(body.temperature, 1.0),
        top_p=given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=given(body.min_p, 0.0),
        seed=draws.seed & _U64,
        choice=draws.choice,
        repetition_penalty=given(body.repetition_penalty, 1.0),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        logit_bias=draws.bias,
        logprobs=logprobs_of(body),
        grammar=draws.grammar,
    )


def logprobs_of(body: GenerationBody) -> int | None:
    """How many likeliest tokens are reported at each position; None: no report."""
    match body:
        case ChatBody():
            return (body.top_logprobs or 0) if body.logprobs else None
        case CompletionBody():
            return None if body.logprobs is False else body.logprobs
        case _:
            return None


def _logit_bias(
    body: GenerationBody, facts: ModelFacts
) -> tuple[tuple[int, float], ...]:
    given = {int(token): float(v) for token, v in (body.logit_bias or {}).items()}
    strange = [token for token in given if token >= facts.vocab_size]
    if strange:
        raise bad_param(
            "logit_bias",
            f"logit_bias: token {strange[0]} is not below {facts.vocab_size}",
        )
    return tuple(sorted(given.items()))


def _stop_ids(ends: Ends, facts: ModelFacts) -> tuple[int, ...]:
    eos = () if ends.ignore_eos else facts.eos_token_ids
    return tuple(dict.fromkeys((*eos, *ends.token_ids)))


def _max_tokens(body: GenerationBody) -> tuple[str, int | None]:
    """The field that limits the answer, and its value."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _check_ids(ids: Sequence[int], facts: ModelFacts, param: str) -> None:
    if not ids:
        raise bad_param(param, f"{param}: the prompt has no tokens")
    if max(ids) >= facts.vocab_size:
        raise bad_param(
            param, f"{param}: token {max(ids)} is not below {facts.vocab_size}"
        )


def _room(
    door: Door, body: GenerationBody, prompt: int, facts: ModelFacts, param: str
) -> int:
    """How long the answer may become."""
    left = facts.max_tokens - prompt
    if left < 1:
        raise _too_long(param, f"the prompt has {prompt} tokens", facts)
    name, asked = _max_tokens(body)
    if asked is None:
        default = door.settings.default_max_tokens
        return min(default, left) if default else left
    if asked > left:
        said = f"the prompt has {prompt} tokens and {name} is {asked}"
        raise _too_long(name, said, facts)
    return asked


def _too_long(param: str, said: str, facts: ModelFacts) -> ApiError:
    return bad_param(
        param,
        f"this model's context is {facts.max_tokens} tokens, but {said}",
        code="context_length_exceeded",
    )
