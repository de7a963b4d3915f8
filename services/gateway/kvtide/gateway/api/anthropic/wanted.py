"""What a body of ``/v1/messages`` wants."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, assert_never

from kvtide.gateway.api.anthropic.schemas import (
    AnyBlock,
    Base64Source,
    ImageBlock,
    MessagesBody,
    PromptBody,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from kvtide.gateway.api.messages import (
    assistant_message,
    joined,
    template_call,
    tool_message,
)
from kvtide.gateway.api.pictures import PictureLimits, PictureTray
from kvtide.gateway.api.problems import bad_param
from kvtide.gateway.api.refusals import refuse_others
from kvtide.gateway.api.structured import of_schema
from kvtide.gateway.api.tools import NO_TOOLS, Tool, ToolUse, chosen
from kvtide.gateway.api.wanted import Ends, Held, Numbers, Wanted
from kvtide.gateway.text.chat import Chat, ChatMessage, picture_part, text_part

_AS_BASE64: Final = (
    'send the picture itself: {"type": "base64", "media_type": "image/png", "data": "…"} '
    "(PNG, JPEG or WebP); this server fetches nothing"
)

_USUAL: Mapping[str, tuple[object, ...]] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "context_management": (None,),
}
"""Field → values that mean "as usual". Any other value is refused by name."""


def wanted_of(body: MessagesBody) -> Wanted:
    """The body's wishes.

    Raises:
        ApiError: 400 that names the field: it is not served, or contradicts another.
    """
    refuse_others(body.model_extra or {}, _USUAL)
    config = body.output_config
    held = None
    if config is not None and config.format is not None:
        held = Held("output_config.format", of_schema(config.format.schema_))
    return Wanted(
        model=body.model,
        numbers=Numbers(body.temperature, body.top_p, body.top_k),
        ends=Ends(
            stops=tuple(body.stop_sequences or ()),
            max_tokens=body.max_tokens,
            stops_param="stop_sequences",
        ),
        held=held,
        tools=use_of(body),
    )


def use_of(body: PromptBody) -> ToolUse:
    """What the model may do with ``tools``.

    Raises:
        ApiError: 400 that names the field.
    """
    tools = tuple(
        Tool(
            tool.name,
            tool.description or "",
            tool.input_schema,
            strict=bool(tool.strict),
        )
        for tool in body.tools or ()
    )
    choice = body.tool_choice
    if choice is None:
        return chosen(ToolUse(tools))
    parallel = choice.disable_parallel_tool_use is not True
    match choice.type:
        case "none":
            chosen(ToolUse(tools))
            return NO_TOOLS
        case "any":
            return chosen(ToolUse(tools, must=True, parallel=parallel))
        case "tool":
            if choice.name is None:
                name = "tool_choice.name"
                raise bad_param(name, f"{name}: the tool's name is missing")
            return chosen(ToolUse(tools, must=True, only=choice.name))
        case "auto":
            return chosen(ToolUse(tools, parallel=parallel))


def chat_of(
    body: PromptBody, use: ToolUse, limits: Callable[[], PictureLimits]
) -> Chat:
    """The body as a chat template takes it. A last turn of the assistant is continued.

    Raises:
        ApiError: a turn has nothing in it that can be used, or a picture is not taken.
    """
    tray = PictureTray(limits)
    messages: list[ChatMessage] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _text(body.system)
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages[{number}].content", tray)
    last = messages[-1]
    goes_on = last["role"] == "assistant" and "tool_calls" not in last
    return Chat(
        messages,
        tools=[tool.in_template for tool in use.tools],
        continue_final=goes_on,
        pictures=tray.pictures,
    )


def _text(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _turn(turn: Turn, param: str, tray: PictureTray) -> list[dict[str, Any]]:
    blocks: Sequence[AnyBlock] = (
        [TextBlock(type="text", text=turn.content)]
        if isinstance(turn.content, str)
        else turn.content
    )
    if not blocks:
        raise bad_param(param, f"{param}: there is nothing in it")
    if turn.role == "assistant":
        return [_assistant(blocks, param)]
    return _user(blocks, turn.role, param, tray)


def _assistant(blocks: Sequence[AnyBlock], param: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(template_call(block.name, block.input, block.id))
            case RedactedBlock():
                pass
            case ToolResultBlock() | ImageBlock():
                raise _misplaced(block, f"{param}[{number}]", "assistant")
            case _:
                assert_never(block)
    return assistant_message("\n".join(texts), calls, "\n".join(thoughts))


def _user(
    blocks: Sequence[AnyBlock], role: str, param: str, tray: PictureTray
) -> list[dict[str, Any]]:
    """Results first, as Anthropic has it: they answer the turn before."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{param}[{number}]"
        match block:
            case TextBlock():
                parts.append(text_part(block.text))
            case ImageBlock() if role == "user":
                _take(block, tray, place)
                parts.append(picture_part())
            case ToolResultBlock():
                results.append(tool_message(block.tool_use_id, _result(block, place)))
            case ImageBlock() | ToolUseBlock() | ThinkingBlock() | RedactedBlock():
                raise _misplaced(block, place, role)
            case _:
                assert_never(block)
    said = {"role": role, "content": joined(parts)}
    return [*results, said] if parts else results


def _take(block: ImageBlock, tray: PictureTray, param: str) -> None:
    place, source = f"{param}.source", block.source
    if isinstance(source, Base64Source):
        tray.add_base64(source.media_type, source.data, place, _AS_BASE64)
    else:
        tray.add_base64("", "", place, _AS_BASE64)


def _misplaced(block: AnyBlock, param: str, role: str) -> Exception:
    return bad_param(param, f"{param}: a {role} turn can't hold a {block.type} block")


def _result(block: ToolResultBlock, param: str) -> str:
    content = block.content
    if not isinstance(content, str):
        texts = [one for one in content or () if isinstance(one, TextBlock)]
        if len(texts) != len(content or ()):
            # chat templates have no place for one in what a tool gave
            place = f"{param}.content"
            raise bad_param(
                place, f"{place}: only a user turn itself may hold pictures"
            )
        content = _text(texts)
    text = content
    return f"Error: {text}" if block.is_error else text
