"""What the bodies of OpenAI's two completion routes want."""

from collections.abc import Callable

from kvtide.gateway.api.messages import template_messages, template_variables
from kvtide.gateway.api.pictures import PictureLimits, PictureTray
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.refusals import refuse_unserved
from kvtide.gateway.api.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    NamedToolChoice,
    TokenizeBody,
    ToolBody,
)
from kvtide.gateway.api.structured import held_of
from kvtide.gateway.api.tools import NO_TOOLS, Tool, ToolUse, chosen
from kvtide.gateway.api.wanted import Ends, Numbers, Wanted
from kvtide.gateway.text.chat import Chat


def wanted_of(body: GenerationBody) -> Wanted:
    """The body's wishes.

    Raises:
        ApiError: 400 that names the field: it is not served, or contradicts another.
    """
    refuse_unserved(body.model_extra or {})
    return Wanted(
        model=body.model,
        count=body.n or 1,
        numbers=_numbers(body),
        ends=_ends(body),
        logprobs=_logprobs(body),
        held=held_of(body),
        tools=_use(body) if isinstance(body, ChatBody) else NO_TOOLS,
        salt=body.cache_salt or "",
        priority=body.priority,
    )


def chat_of(
    body: ChatBody | TokenizeBody, use: ToolUse, limits: Callable[[], PictureLimits]
) -> Chat:
    """The body's messages, and its tools as ``use`` shows them.

    Raises:
        ApiError: a message without content that needs it, or a picture that is not taken.
    """
    tray = PictureTray(limits)
    goes_on = bool(body.continue_final_message)
    messages = template_messages(body.messages or (), tray)
    if goes_on and (not messages or messages[-1]["role"] != "assistant"):
        name = "continue_final_message"
        raise bad_param(name, f"{name}: the last message is not the assistant's")
    return Chat(
        messages,
        tools=[tool.in_template for tool in use.tools],
        variables=template_variables(body.chat_template_kwargs),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=goes_on,
        pictures=tray.pictures,
    )


def tools_of(tools: list[ToolBody] | None) -> tuple[Tool, ...]:
    """The neutral form of ``tools``."""
    return tuple(
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters or {},
            strict=bool(tool.function.strict),
        )
        for tool in tools or ()
    )


def _use(body: ChatBody) -> ToolUse:
    tools = tools_of(body.tools)
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case "none":
            chosen(ToolUse(tools))
            return NO_TOOLS
        case "required":
            return chosen(ToolUse(tools, must=True, parallel=parallel))
        case NamedToolChoice(function=function):
            return chosen(ToolUse(tools, must=True, only=function.name))
        case _:
            return chosen(ToolUse(tools, parallel=parallel))


def _numbers(body: GenerationBody) -> Numbers:
    return Numbers(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        logit_bias=body.logit_bias or {},
    )


def _ends(body: GenerationBody) -> Ends:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    name, limit = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name, limit = "max_completion_tokens", body.max_completion_tokens
    return Ends(
        stops=stops,
        token_ids=tuple(body.stop_token_ids or ()),
        max_tokens=limit,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        max_tokens_param=name,
    )


def _logprobs(body: GenerationBody) -> int | None:
    """How many likeliest tokens are reported at each position; None: no report."""
    match body:
        case ChatBody():
            if body.top_logprobs and not body.logprobs:
                raise bad_param("top_logprobs", "top_logprobs is for logprobs: true")
            return (body.top_logprobs or 0) if body.logprobs else None
        case CompletionBody():
            logprobs = None if body.logprobs is False else body.logprobs
            if body.echo and logprobs is not None:
                raise bad_param(
                    "echo",
                    "echo with logprobs is not supported by this server: a prompt's own "
                    "log-probabilities are not computed",
                    code="unsupported_parameter",
                )
            return logprobs
        case _:
            return None
