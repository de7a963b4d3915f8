"""What clients of ``/v1/responses`` send. Strict types; unknown fields are ignored."""

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from kvtide.gateway.api.schemas import (
    Body,
    Count,
    JsonObjectFormat,
    Part,
    Temperature,
    TextFormat,
    ToolName,
    ToolWord,
    TopLogprobs,
    TopP,
)


class TextPart(Part):
    """Text that the client or the model wrote."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ImagePart(Part):
    """A picture, for models that take some; only ``data:`` URLs are taken."""

    type: Literal["input_image"]
    image_url: str | None = None


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ReasoningPart(Part):
    """A part of what the model thought before."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Part):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]


class CallItem(Part):
    """A call that the model made before."""

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str


class OutputItem(Part):
    """What a call came back with."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]


class ReasoningItem(Part):
    """What the model thought before."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None


def _kind(value: object) -> str:
    """A message may leave its type out."""
    if isinstance(value, dict):
        return str(cast("dict[str, object]", value).get("type", "message"))
    return str(getattr(value, "type", "message"))


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionSpec(Part):
    """One of ``tools``; only the client's own functions are served."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Part):
    """``tool_choice``: this one."""

    type: Literal["function"]
    name: ToolName


class SchemaFormat(Part):
    """``text.format``: JSON of this schema."""

    type: Literal["json_schema"]
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Part):
    """``text``."""

    format: (
        Annotated[
            TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")
        ]
        | None
    ) = None


class ResponsesBody(Body):
    """``/v1/responses``."""

    model: str
    input: str | Annotated[list[AnyItem], Field(min_length=1, max_length=65536)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionSpec], Field(max_length=128)] | None = None
    tool_choice: ToolWord | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
