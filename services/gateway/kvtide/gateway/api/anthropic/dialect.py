"""Anthropic's messages, whole or as named events."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, assert_never, cast

import msgspec

from kvtide.gateway.api.answers import Answers, Choice, Said
from kvtide.gateway.api.anthropic import replies
from kvtide.gateway.api.dialect import Frame, data_event, named_event
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.life import Usage
from kvtide.gateway.reading import (
    Block,
    BlockKind,
    Change,
    Closed,
    Grown,
    Opened,
)


class MessagesDialect:
    """See ``Dialect``. There is one answer, whose blocks come one after another."""

    def __init__(self, frame: Frame) -> None:
        """Share ``frame`` in all pieces."""
        self.frame = frame

    def opening(self, answers: Answers) -> bytes:
        """See ``Dialect.opening``: what of the cost is known."""
        (prompt,) = answers.prompt_ids
        usage = replies.UsageReply.of(Usage(len(prompt), 0, 0))
        message = replies.MessageReply(
            self.frame.id, self.frame.model, [], None, None, usage
        )
        return _event(replies.MessageStart(message))

    def piece(self, said: Said) -> bytes:
        """See ``Dialect.piece``."""
        return b"".join(self._events(said.choice, said.changes))

    def ending(self, choice: Choice) -> bytes:
        """See ``Dialect.ending``: told with the cost, in ``closing``."""
        del choice
        return b""

    def closing(self, answers: Answers) -> bytes:
        """See ``Dialect.closing``."""
        (choice,) = answers.choices
        stopped = replies.Stopped(_reason(choice), choice.stopped_by)
        usage = replies.UsageReply.of(answers.usage)
        return _event(replies.MessageDelta(stopped, usage)) + _event(
            replies.MessageStop()
        )

    def failure(self, error: ApiError) -> bytes:
        """See ``Dialect.failure``."""
        return b"event: error\n" + data_event(error.anthropic_body(self.frame.id))

    def whole(self, answers: Answers) -> bytes:
        """See ``Dialect.whole``."""
        (choice,) = answers.choices
        message = replies.MessageReply(
            self.frame.id,
            self.frame.model,
            [_content(choice, block, whole=True) for block in choice.blocks.all],
            _reason(choice),
            choice.stopped_by,
            replies.UsageReply.of(answers.usage),
        )
        return msgspec.json.encode(message)

    def _events(self, choice: Choice, changes: Sequence[Change]) -> Iterator[bytes]:
        for change in changes:
            match change:
                case Opened(block):
                    start = _content(choice, block, whole=False)
                    yield _event(replies.BlockStart(block.index, start))
                case Grown(block, text):
                    delta = _delta(block.kind, text)
                    yield _event(replies.BlockDelta(block.index, delta))
                case Closed(block):
                    yield _event(replies.BlockStop(block.index))
                case _:
                    assert_never(change)


def _event(reply: msgspec.Struct) -> bytes:
    name = reply.__struct_config__.tag
    return named_event(str(name), reply)


def _reason(choice: Choice) -> str:
    if choice.reason == "length":
        return "max_tokens"
    if choice.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if choice.blocks.has_calls else "end_turn"


def _content(choice: Choice, block: Block, *, whole: bool) -> replies.ContentReply:
    text = block.text if whole else ""
    match block.kind:
        case BlockKind.CONTENT:
            return replies.TextReply(text)
        case BlockKind.REASONING:
            return replies.ThinkingReply(text)
        case BlockKind.CALL:
            name = f"toolu_{choice.call_id(block.call)}"
            return replies.ToolUseReply(name, block.name, _input(text))


def _delta(
    kind: BlockKind, text: str
) -> replies.TextDelta | replies.ThinkingDelta | replies.InputDelta:
    match kind:
        case BlockKind.CONTENT:
            return replies.TextDelta(text)
        case BlockKind.REASONING:
            return replies.ThinkingDelta(text)
        case BlockKind.CALL:
            return replies.InputDelta(text)


def _input(text: str) -> dict[str, Any]:
    """The arguments; an answer that was cut short may hold none that can be read."""
    try:
        value: object = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
