"""What clients of ``/v1/messages`` send. Strict types; unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvtide.gateway.api.schemas import MAX_TOKENS_BOUND, Body, Part, ToolName, TopP

Zero2One = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class TextBlock(Part):
    """Text."""

    type: Literal["text"]
    text: str


class Base64Source(Part):
    """A picture itself."""

    type: Literal["base64"]
    media_type: str
    data: str


class OtherSource(Part):
    """A picture that is elsewhere: nothing is fetched, so it is refused."""

    type: Literal["url", "file"]


class ImageBlock(Part):
    """A picture, for models that take some."""

    type: Literal["image"]
    source: Annotated[Base64Source | OtherSource, Field(discriminator="type")]


class ThinkingBlock(Part):
    """What the model thought before."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Part):
    """What nobody may read: no model here made it, so none can use it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Part):
    """A call that the model made before."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(Part):
    """What a call came back with."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        str
        | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]
        | None
    ) = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]


class Turn(Part):
    """One of ``messages``."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class ToolSpec(Part):
    """One of ``tools``; only the client's own are served."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoiceSpec(Part):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class SchemaFormat(Part):
    """``output_config.format``: JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """``output_config``."""

    format: SchemaFormat | None = None


class PromptBody(Body):
    """What a chat is made of: all of ``/v1/messages/count_tokens``."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=65536)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=128)] | None = None
    tool_choice: ToolChoiceSpec | None = None


class MessagesBody(PromptBody):
    """``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_BOUND)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Zero2One | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    output_config: OutputConfig | None = None
