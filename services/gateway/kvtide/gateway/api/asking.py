"""From what a client wants to what is asked of the workers. Every number is checked."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.bus.messages import GrammarSpec, SamplingSpec
from kvtide.gateway.api.call_grammar import Tongue
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.held import grammar_of
from kvtide.gateway.api.pictures import check_sent
from kvtide.gateway.api.problems import ApiError, bad_param
from kvtide.gateway.api.wanted import Asker, Ends, Wanted
from kvtide.gateway.life import RequestSpec
from kvtide.gateway.reading import AnswerReader, CallFormat, Thinking, reader_of
from kvtide.gateway.served import Prompt
from kvtide.kv import KeySpace, ModelFacts, answer_name

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request as ids. ``param`` is the field that they came in.

    The answer to a chat is read: for reasoning, and for calls if there are tools. Its one
    prompt may have ``pictures``.
    """

    ids: Sequence[Sequence[int]]
    param: str
    is_chat: bool = False
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """One answer that is to be made: number ``index`` of the client's request."""

    index: int
    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers are to be read."""

    thinking: Thinking | None = None
    form: CallFormat | None = None
    tools: tuple[str, ...] = ()

    def reader(self) -> AnswerReader:
        """For one answer."""
        return reader_of(self.thinking, self.form, self.tools)


@dataclass(frozen=True, slots=True)
class Questions:
    """All answers to one client's request, ready to be submitted.

    ``per_prompt`` answers in a row share a prompt.
    """

    items: tuple[Question, ...]
    space: KeySpace
    stops: tuple[str, ...]
    per_prompt: int
    reading: Reading


def check_wanted(door: Door, wanted: Wanted, prompts: int) -> None:
    """What can be said before the prompt is tokenised.

    Raises:
        ApiError: an unknown model, too many answers, bad stop strings.
        UnavailableError: no room for that many more requests, or the model isn't ready.
    """
    door.check_model(wanted.model)
    count = prompts * wanted.count
    if count > door.settings.max_choices:
        raise bad_param(
            "n" if wanted.count > 1 else "prompt",
            f"{count} answers were asked for; at most {door.settings.max_choices} are "
            "made per request",
        )
    _check_ends(door, wanted.ends)
    door.gateway.check_room(count)
    door.served.facts(wanted.model)


def _check_ends(door: Door, ends: Ends) -> None:
    settings = door.settings
    param = ends.stops_param
    for name, given in ((param, ends.stops), ("stop_token_ids", ends.token_ids)):
        if len(given) > settings.max_stops:
            raise bad_param(name, f"{name}: at most {settings.max_stops} are allowed")
    if any(not stop or len(stop) > settings.max_stop_chars for stop in ends.stops):
        raise bad_param(
            param, f"{param}: each must have 1 to {settings.max_stop_chars} characters"
        )


async def questions_of(
    door: Door, wanted: Wanted, prompts: Prompts, asker: Asker
) -> Questions:
    """Everything that the workers are asked for the prompts' ids.

    Raises:
        ApiError: 400 that names the field.
        UnavailableError: the model is not ready.
    """
    facts = door.served.facts(wanted.model)
    _check_pictures(door, wanted, prompts, facts)
    bias = _logit_bias(wanted, facts)
    reading = _reading(door, wanted, prompts)
    tongue = Tongue(
        door.served.text.call_format, reading.thinking, door.served.text.is_token
    )
    grammar = await grammar_of(wanted, tongue)
    owner = asker.caller.cache_owner
    space = door.served.space(owner, facts, wanted.salt)
    seed = wanted.numbers.seed
    draws = Draws(seed if seed is not None else secrets.randbits(63), bias, grammar)
    items: list[Question] = []
    for ids in prompts.ids:
        _check_ids(ids, facts, prompts.param)
        limit = _room(door, wanted.ends, len(ids), facts, prompts.param)
        if wanted.ends.min_tokens > limit:
            raise bad_param("min_tokens", f"min_tokens is more than {limit}")
        prompt = await _keyed(door, ids, space, prompts)
        for _ in range(wanted.count):
            index = len(items)
            spec = RequestSpec(
                request=answer_name(asker.request_id, index),
                gateway=door.gateway.node.ref,
                tenant=asker.caller.tenant,
                cache_owner=owner,
                salt=wanted.salt,
                model=facts.name,
                prompt=prompt.ids,
                keys=prompt.keys,
                digest=facts.digest,
                pictures=prompts.pictures,
                sampling=_sampling(wanted, draws, index),
                max_new_tokens=limit,
                min_new_tokens=wanted.ends.min_tokens,
                stop_token_ids=_stop_ids(wanted.ends, facts),
                ignore_eos=wanted.ends.ignore_eos,
                ttft_ms=asker.wishes.ttft_ms,
                tbt_ms=asker.wishes.tbt_ms,
                priority=_priority(wanted, asker),
            )
            items.append(Question(index, spec))
    return Questions(tuple(items), space, wanted.ends.stops, wanted.count, reading)


def _check_pictures(
    door: Door, wanted: Wanted, prompts: Prompts, facts: ModelFacts
) -> None:
    pictures, param = prompts.pictures, prompts.param
    if not pictures:
        return
    if not facts.pictures:
        raise bad_param(param, f"{param}: this model takes no pictures")
    check_sent(pictures, wanted.count, door.settings.max_pictures_bytes, param)


async def _keyed(
    door: Door, ids: Sequence[int], space: KeySpace, prompts: Prompts
) -> Prompt:
    """With its keys; keys of tokens alone would be equal for other pictures."""
    if prompts.pictures:
        return Prompt(tuple(ids), ())
    return await door.served.prompt(ids, space)


def _reading(door: Door, wanted: Wanted, prompts: Prompts) -> Reading:
    if not prompts.is_chat:
        return Reading()
    text = door.served.text
    # all prompts of a chat are one
    thinking = text.thinking_after(prompts.ids[0])
    form = text.call_format if wanted.tools.tools else None
    return Reading(thinking, form, tuple(wanted.tools.names))


def _priority(wanted: Wanted, asker: Asker) -> int:
    """The body is the client's own word; a header may come from a proxy."""
    given = wanted.priority if wanted.priority is not None else asker.wishes.priority
    return given or 0


@dataclass(frozen=True, slots=True)
class Draws:
    """What decides an answer's tokens beside the client's numbers."""

    seed: int
    bias: tuple[tuple[int, float], ...]
    grammar: GrammarSpec | None


def _sampling(wanted: Wanted, draws: Draws, choice: int) -> SamplingSpec:
    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    numbers = wanted.numbers
    return SamplingSpec(
        temperature=given(numbers.temperature, 1.0),
        top_p=given(numbers.top_p, 1.0),
        top_k=max(0, numbers.top_k or 0),
        min_p=given(numbers.min_p, 0.0),
        seed=draws.seed & _U64,
        choice=choice,
        repetition_penalty=given(numbers.repetition_penalty, 1.0),
        presence_penalty=given(numbers.presence_penalty, 0.0),
        frequency_penalty=given(numbers.frequency_penalty, 0.0),
        logit_bias=draws.bias,
        logprobs=wanted.logprobs,
        grammar=draws.grammar,
    )


def _logit_bias(wanted: Wanted, facts: ModelFacts) -> tuple[tuple[int, float], ...]:
    given = {int(t): float(v) for t, v in wanted.numbers.logit_bias.items()}
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


def _check_ids(ids: Sequence[int], facts: ModelFacts, param: str) -> None:
    if not ids:
        raise bad_param(param, f"{param}: the prompt has no tokens")
    if max(ids) >= facts.vocab_size:
        raise bad_param(
            param, f"{param}: token {max(ids)} is not below {facts.vocab_size}"
        )


def _room(door: Door, ends: Ends, prompt: int, facts: ModelFacts, param: str) -> int:
    """How long the answer may become."""
    left = facts.max_tokens - prompt
    if left < 1:
        raise _too_long(param, f"the prompt has {prompt} tokens", facts)
    if ends.max_tokens is None:
        default = door.settings.default_max_tokens
        return min(default, left) if default else left
    if ends.max_tokens > left:
        name = ends.max_tokens_param
        said = f"the prompt has {prompt} tokens and {name} is {ends.max_tokens}"
        raise _too_long(name, said, facts)
    return ends.max_tokens


def _too_long(param: str, said: str, facts: ModelFacts) -> ApiError:
    return bad_param(
        param,
        f"this model's context is {facts.max_tokens} tokens, but {said}",
        code="context_length_exceeded",
    )
