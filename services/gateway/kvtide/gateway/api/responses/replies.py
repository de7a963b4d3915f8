"""What clients of ``/v1/responses`` get, as OpenAI words it. Encoded by msgspec."""

from typing import Any

import msgspec

from kvtide.gateway.api.replies import ChatTokenLogprob
from kvtide.gateway.life import Usage


class InputDetails(msgspec.Struct, frozen=True):
    """``input_tokens_details``."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """``output_tokens_details``."""

    reasoning_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    """``usage``."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> "UsageReply":
        """The cost of the answer."""
        return cls(
            usage.prompt_tokens,
            InputDetails(usage.cached_tokens),
            usage.output_tokens,
            OutputDetails(reasoning_tokens),
            usage.prompt_tokens + usage.output_tokens,
        )


class TextPart(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    """What the model says."""

    text: str
    annotations: list[None] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningPart(
    msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"
):
    """What the model thought."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    """A message of the model."""

    id: str
    status: str
    content: list[TextPart]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    """The model's reasoning; there is no summary of it."""

    id: str
    status: str
    content: list[ReasoningPart]
    summary: list[None] = []


class CallItem(msgspec.Struct, frozen=True, tag="function_call", tag_field="type"):
    """A call."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


Item = MessageItem | ReasoningItem | CallItem


class Incomplete(msgspec.Struct, frozen=True):
    """``incomplete_details``."""

    reason: str


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A response, whole or as far as it is."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[Item]
    usage: UsageReply | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    object: str = "response"
    error: None = None
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"
    background: bool = False
    user: str | None = None


class ResponseEvent(msgspec.Struct, frozen=True):
    """``response.created``, ``.in_progress``, ``.completed``, ``.incomplete``."""

    type: str
    sequence_number: int
    response: ResponseReply


class ItemEvent(msgspec.Struct, frozen=True):
    """``response.output_item.added`` and ``.done``."""

    type: str
    sequence_number: int
    output_index: int
    item: Item


class PartEvent(msgspec.Struct, frozen=True):
    """``response.content_part.added`` and ``.done``."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    part: TextPart | ReasoningPart
    content_index: int = 0


class DeltaEvent(msgspec.Struct, frozen=True):
    """More text of an item, of the kind that ``type`` says."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatTokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class DoneEvent(msgspec.Struct, frozen=True):
    """An item's text is whole; which field has it depends on ``type``."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatTokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class FailureDetails(msgspec.Struct, frozen=True):
    """``error`` of a failure in mid-stream."""

    message: str
    type: str
    param: str | None
    code: str | None


class FailureEvent(msgspec.Struct, frozen=True):
    """``error``: the stream ends here."""

    type: str
    sequence_number: int
    code: str | None
    message: str
    param: str | None
    error: FailureDetails
