"""How answers look: as a chat's messages, or as text completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtide.gateway.api.answers import Answers, Choice
from kvtide.gateway.api.replies import (
    ChatChoice,
    ChatLogprobs,
    ChatMessageReply,
    ChatTokenLogprob,
    ChunkChoice,
    CompletionReply,
    Delta,
    Insight,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    UsageReply,
)
from kvtide.gateway.api.token_report import ReportedToken
from kvtide.gateway.life import Emit

UNSET = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Frame:
    """What all pieces of one response share, and what the client wants to see."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool
    show_ids: bool
    show_logprobs: bool
    show_insight: bool

    def tokens(
        self, choice: Choice, start: int, end: int
    ) -> Sequence[ReportedToken] | None:
        """The tokens start..end of an answer, if they were asked for."""
        return choice.report.tokens[start:end] if self.show_logprobs else None

    def insight(self, choice: Choice) -> Insight | msgspec.UnsetType:
        """How an answer was made, if that was asked for."""
        return choice.insight if self.show_insight else UNSET


class Dialect(Protocol):
    """One of OpenAI's two forms. Methods make whole JSON bodies."""

    frame: Frame

    def opening(self, choice: Choice) -> bytes | None:
        """The first chunk of an answer; None if there is none."""
        ...

    def piece(self, choice: Choice, emit: Emit) -> bytes:
        """A chunk with more of an answer."""
        ...

    def ending(self, choice: Choice) -> bytes:
        """The chunk with the answer's one finish reason."""
        ...

    def costs(self, usage: UsageReply) -> bytes:
        """The chunk with the usage and no choices."""
        ...

    def whole(self, answers: Answers) -> bytes:
        """The body of a response that is not streamed."""
        ...


class ChatDialect:
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, frame: Frame) -> None:
        """Share ``frame`` in all pieces."""
        self.frame = frame

    def opening(self, choice: Choice) -> bytes | None:
        """See ``Dialect.opening``: the role, alone."""
        delta = Delta(role="assistant", content="")
        return self._chunk([ChunkChoice(choice.index, delta)])

    def piece(self, choice: Choice, emit: Emit) -> bytes:
        """See ``Dialect.piece``."""
        end = emit.index + len(emit.ids)
        piece = ChunkChoice(
            choice.index,
            Delta(content=emit.text),
            logprobs=_chat_logprobs(self.frame.tokens(choice, emit.index, end)),
            token_ids=list(emit.ids) if self.frame.show_ids else UNSET,
        )
        return self._chunk([piece])

    def ending(self, choice: Choice) -> bytes:
        """See ``Dialect.ending``."""
        ending = ChunkChoice(
            choice.index,
            Delta(),
            finish_reason=choice.reason,
            kvtide=self.frame.insight(choice),
        )
        return self._chunk([ending])

    def costs(self, usage: UsageReply) -> bytes:
        """See ``Dialect.costs``."""
        return self._chunk([], usage)

    def whole(self, answers: Answers) -> bytes:
        """See ``Dialect.whole``."""
        choices = [
            ChatChoice(
                choice.index,
                ChatMessageReply("".join(choice.text)),
                choice.reason or "",
                logprobs=_chat_logprobs(self.frame.tokens(choice, 0, len(choice.ids))),
                token_ids=choice.ids if self.frame.show_ids else UNSET,
                kvtide=self.frame.insight(choice),
            )
            for choice in answers.choices
        ]
        prompt = answers.prompt_ids[0] if self.frame.show_ids else UNSET
        return _encode(
            self.frame, "chat.completion", choices, answers.usage, prompt_ids=prompt
        )

    def _chunk(
        self, choices: list[ChunkChoice], usage: UsageReply | None = None
    ) -> bytes:
        return _encode_chunk(self.frame, "chat.completion.chunk", choices, usage)


class TextDialect:
    """``text_completion``, whole or in chunks."""

    def __init__(self, frame: Frame) -> None:
        """Share ``frame`` in all pieces."""
        self.frame = frame

    def opening(self, choice: Choice) -> bytes | None:
        """See ``Dialect.opening``: text has no role."""
        del choice
        return None

    def piece(self, choice: Choice, emit: Emit) -> bytes:
        """See ``Dialect.piece``."""
        end = emit.index + len(emit.ids)
        piece = TextChoice(
            choice.index,
            emit.text,
            None,
            logprobs=_text_logprobs(self.frame.tokens(choice, emit.index, end)),
            token_ids=list(emit.ids) if self.frame.show_ids else UNSET,
        )
        return self._chunk([piece])

    def ending(self, choice: Choice) -> bytes:
        """See ``Dialect.ending``."""
        insight = self.frame.insight(choice)
        ending = TextChoice(choice.index, "", choice.reason, kvtide=insight)
        return self._chunk([ending])

    def costs(self, usage: UsageReply) -> bytes:
        """See ``Dialect.costs``."""
        return self._chunk([], usage)

    def whole(self, answers: Answers) -> bytes:
        """See ``Dialect.whole``."""
        show = self.frame.show_ids
        choices = [
            TextChoice(
                choice.index,
                "".join(choice.text),
                choice.reason,
                logprobs=_text_logprobs(self.frame.tokens(choice, 0, len(choice.ids))),
                token_ids=choice.ids if show else UNSET,
                prompt_token_ids=prompt if show else UNSET,
                kvtide=self.frame.insight(choice),
            )
            for choice, prompt in zip(answers.choices, answers.prompt_ids, strict=True)
        ]
        return _encode(self.frame, "text_completion", choices, answers.usage)

    def _chunk(
        self, choices: list[TextChoice], usage: UsageReply | None = None
    ) -> bytes:
        return _encode_chunk(self.frame, "text_completion", choices, usage)


def _chat_logprobs(tokens: Sequence[ReportedToken] | None) -> ChatLogprobs | None:
    if not tokens:  # a piece may be text alone, that was held back
        return None
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                one.token.text,
                one.token.logprob,
                list(one.token.raw),
                [TokenLogprob(t.text, t.logprob, list(t.raw)) for t in one.top],
            )
            for one in tokens
        ]
    )


def _text_logprobs(tokens: Sequence[ReportedToken] | None) -> TextLogprobs | None:
    if not tokens:
        return None
    return TextLogprobs(
        [one.offset for one in tokens],
        [one.token.logprob for one in tokens],
        [one.token.text for one in tokens],
        # the token itself is among them, whatever its rank
        [{t.text: t.logprob for t in (one.token, *one.top)} for one in tokens],
    )


AnyChoices = list[ChatChoice] | list[TextChoice] | list[ChunkChoice]


def _encode_chunk(
    frame: Frame, kind: str, choices: AnyChoices, usage: UsageReply | None
) -> bytes:
    # a client that asked for usage gets null in every chunk but the last
    return _encode(frame, kind, choices, usage if frame.include_usage else UNSET)


def _encode(
    frame: Frame,
    kind: str,
    choices: AnyChoices,
    usage: UsageReply | msgspec.UnsetType | None,
    *,
    prompt_ids: list[int] | msgspec.UnsetType = UNSET,
) -> bytes:
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
