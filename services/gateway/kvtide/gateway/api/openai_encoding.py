"""What OpenAI's two completion dialects share: chunks, usage, the end of a stream."""

import msgspec

from kvtide.gateway.api.answers import Answers
from kvtide.gateway.api.dialect import UNSET, Frame, data_event
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.api.replies import (
    AnyChoice,
    ChunkChoice,
    CompletionReply,
    UsageReply,
)

DONE = b"data: [DONE]\n\n"


def usage_of(answers: Answers) -> UsageReply:
    """``usage``."""
    return UsageReply.of(answers.usage, answers.reasoning_tokens)


def whole_body(
    frame: Frame,
    kind: str,
    choices: list[AnyChoice],
    usage: UsageReply | msgspec.UnsetType | None,
    *,
    prompt_ids: list[int] | msgspec.UnsetType = UNSET,
) -> bytes:
    """A whole completion."""
    reply = CompletionReply(
        id=frame.id,
        object=kind,
        created=frame.created,
        model=frame.model,
        system_fingerprint=frame.fingerprint,
        choices=choices,
        usage=usage,
        prompt_token_ids=prompt_ids,
    )
    return msgspec.json.encode(reply)


def chunk(
    frame: Frame, kind: str, choices: list[AnyChoice], usage: UsageReply | None = None
) -> bytes:
    """A chunk as an event; if usage was asked for it is null in all but the last."""
    shown = usage if frame.include_usage else UNSET
    return data_event(whole_body(frame, kind, choices, shown))


def closing(frame: Frame, kind: str, answers: Answers) -> bytes:
    """The usage if it was asked for, and the mark of the end."""
    if not frame.include_usage:
        return DONE
    none: list[ChunkChoice] = []
    return chunk(frame, kind, none, usage_of(answers)) + DONE


def failure(error: ApiError) -> bytes:
    """An error event, after which nothing comes."""
    return data_event(error.body())
