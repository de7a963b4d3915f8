"""What a body of ``/v1/responses`` wants."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from kvtide.gateway.api.messages import (
    assistant_message,
    joined,
    read_arguments,
    template_call,
    tool_message,
)
from kvtide.gateway.api.pictures import PictureLimits, PictureTray
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.refusals import refuse_others
from kvtide.gateway.api.responses.schemas import (
    AnyItem,
    CallItem,
    ContentPart,
    MessageItem,
    NamedChoice,
    OutputItem,
    ReasoningItem,
    ResponsesBody,
    SchemaFormat,
    TextPart,
)
from kvtide.gateway.api.schemas import JsonObjectFormat
from kvtide.gateway.api.structured import ANY_OBJECT, of_schema
from kvtide.gateway.api.tools import NO_TOOLS, Tool, ToolUse, chosen
from kvtide.gateway.api.wanted import Ends, Held, Numbers, Wanted
from kvtide.gateway.text.chat import Chat, ChatMessage, picture_part, text_part

LOGPROBS = "message.output_text.logprobs"

_USUAL: Mapping[str, tuple[object, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "stream_options": (None, {}, {"include_obfuscation": False}),
}
"""Field → values that mean "as usual": no response is kept. Others are refused."""


def wanted_of(body: ResponsesBody) -> Wanted:
    """The body's wishes.

    Raises:
        ApiError: 400 that names the field: it is not served, or contradicts another.
    """
    refuse_others(body.model_extra or {}, _USUAL)
    return Wanted(
        model=body.model,
        numbers=Numbers(body.temperature, body.top_p),
        ends=Ends(
            max_tokens=body.max_output_tokens, max_tokens_param="max_output_tokens"
        ),
        logprobs=(body.top_logprobs or 0) if wants_logprobs(body) else None,
        held=_held(body),
        tools=_use(body),
    )


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the tokens' log-probabilities are to be told."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def _held(body: ResponsesBody) -> Held | None:
    match body.text.format if body.text is not None else None:
        case JsonObjectFormat():
            return Held("text.format", ANY_OBJECT)
        case SchemaFormat(schema_=schema):
            return Held("text.format", of_schema(schema))
        case _:
            return None


def _use(body: ResponsesBody) -> ToolUse:
    tools = tuple(
        Tool(
            tool.name,
            tool.description or "",
            tool.parameters or {},
            # schemas are strict here unless said otherwise, but ours may be held loosely
            strict=tool.strict is True,
        )
        for tool in body.tools or ()
    )
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case "none":
            chosen(ToolUse(tools))
            return NO_TOOLS
        case "required":
            return chosen(ToolUse(tools, must=True, parallel=parallel))
        case NamedChoice(name=name):
            return chosen(ToolUse(tools, must=True, only=name))
        case _:
            return chosen(ToolUse(tools, parallel=parallel))


def chat_of(
    body: ResponsesBody, use: ToolUse, limits: Callable[[], PictureLimits]
) -> Chat:
    """Instructions and input as a chat template takes them.

    Raises:
        ApiError: a picture that is not taken.
    """
    tray = PictureTray(limits)
    messages: list[ChatMessage] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _turns(body.input, tray)
    return Chat(
        messages,
        param="input",
        tools=[tool.in_template for tool in use.tools],
        pictures=tray.pictures,
    )


def _turns(items: Sequence[AnyItem], tray: PictureTray) -> list[ChatMessage]:
    """Items to messages: what the model did between two inputs is one turn of it."""
    made: list[ChatMessage] = []
    turn = _Turn()
    for number, item in enumerate(items):
        param = f"input[{number}]"
        match item:
            case MessageItem(role="assistant"):
                turn.texts.append(_text(item.content, f"{param}.content"))
            case CallItem():
                arguments = read_arguments(item.arguments)
                call = template_call(item.name, arguments, item.call_id)
                turn.calls.append(call)
            case ReasoningItem():
                turn.thoughts += [part.text for part in item.content or ()]
            case MessageItem():
                made += turn.taken()
                role = "system" if item.role == "developer" else item.role
                said = _said(item, f"{param}.content", tray)
                made.append({"role": role, "content": said})
            case OutputItem():
                made += turn.taken()
                output = _text(item.output, f"{param}.output")
                made.append(tool_message(item.call_id, output))
            case _:
                assert_never(item)
    return [*made, *turn.taken()]


class _Turn:
    """What the model said, thought and called since the last input."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ChatMessage] = []

    def taken(self) -> list[ChatMessage]:
        """The turn as a message, if there is one; then it is empty again."""
        if not (self.texts or self.calls):
            return []
        message = assistant_message(
            "\n".join(self.texts), self.calls, "\n".join(self.thoughts)
        )
        self.__init__()
        return [message]


def _said(
    item: MessageItem, param: str, tray: PictureTray
) -> str | list[dict[str, Any]]:
    """A user's message may hold pictures beside its text."""
    if item.role != "user" or isinstance(item.content, str):
        return _text(item.content, param)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(item.content):
        if isinstance(part, TextPart):
            parts.append(text_part(part.text))
        else:
            tray.add(part.image_url or "", f"{param}[{number}].image_url")
            parts.append(picture_part())
    return joined(parts)


def _text(content: str | Sequence[ContentPart], param: str) -> str:
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) != len(content):
        raise bad_param(param, f"{param}: only a user message may hold pictures")
    return "\n".join(texts)
