"""What clients of ``/v1/messages`` get, as Anthropic words it. Encoded by msgspec."""

from typing import Any

import msgspec

from kvtide.gateway.life import Usage


class UsageReply(msgspec.Struct, frozen=True):
    """``usage``; ``input_tokens`` are those that were not in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage) -> "UsageReply":
        """The cost of the answer."""
        new = usage.prompt_tokens - usage.cached_tokens
        return cls(new, usage.output_tokens, usage.cached_tokens)


class TextReply(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """What the model says."""

    text: str


class ThinkingReply(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    """What the model thought."""

    thinking: str
    signature: str = ""


class ToolUseReply(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    """A call; in a stream ``input`` is empty and comes as deltas."""

    id: str
    name: str
    input: dict[str, Any]


ContentReply = TextReply | ThinkingReply | ToolUseReply


class MessageReply(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    """A whole answer, or what is known at its start."""

    id: str
    model: str
    content: list[ContentReply]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageReply
    role: str = "assistant"


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    """The stream begins."""

    message: MessageReply


class BlockStart(
    msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"
):
    """A block begins."""

    index: int
    content_block: ContentReply


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    """More text."""

    text: str


class ThinkingDelta(
    msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"
):
    """More reasoning."""

    thinking: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    """More of a call's input, as JSON."""

    partial_json: str


class BlockDelta(
    msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"
):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(
    msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"
):
    """A block is whole."""

    index: int


class Stopped(msgspec.Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    """The answer is finished."""

    delta: Stopped
    usage: UsageReply


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """The stream is finished."""


class CountReply(msgspec.Struct, frozen=True):
    """``/v1/messages/count_tokens``."""

    input_tokens: int
