"""``chat.completion`` and ``chat.completion.chunk``."""

from collections.abc import Sequence

from kvtide.gateway.api import openai_encoding as openai
from kvtide.gateway.api.answers import Answers, Choice, Said
from kvtide.gateway.api.dialect import UNSET, Frame
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.api.replies import (
    CalledFunction,
    CallReply,
    ChatChoice,
    ChatLogprobs,
    ChatMessageReply,
    ChatTokenLogprob,
    ChunkChoice,
    Delta,
    TokenLogprob,
)
from kvtide.gateway.api.token_report import ReportedToken
from kvtide.gateway.life import Emit
from kvtide.gateway.reading import Block, BlockKind, Change, Grown, Opened

WHOLE = "chat.completion"
CHUNK = "chat.completion.chunk"


class ChatDialect:
    """See ``Dialect``."""

    def __init__(self, frame: Frame) -> None:
        """Share ``frame`` in all pieces."""
        self.frame = frame

    def opening(self, answers: Answers) -> bytes:
        """See ``Dialect.opening``: each answer's role, alone."""
        delta = Delta(role="assistant", content="")
        return b"".join(
            openai.chunk(self.frame, CHUNK, [ChunkChoice(choice.index, delta)])
            for choice in answers.choices
        )

    def piece(self, said: Said) -> bytes:
        """See ``Dialect.piece``."""
        choice = said.choice
        emit = said.command if isinstance(said.command, Emit) else Emit(0, (), "")
        delta = _delta(choice, said.changes)
        shows = self.frame.show_ids or self.frame.show_logprobs
        if delta is None and not (emit.ids and shows):
            return b""
        end = emit.index + len(emit.ids)
        piece = ChunkChoice(
            choice.index,
            delta or Delta(content=""),
            logprobs=_logprobs(self.frame.tokens(choice, emit.index, end)),
            token_ids=list(emit.ids) if self.frame.show_ids else UNSET,
        )
        return openai.chunk(self.frame, CHUNK, [piece])

    def ending(self, choice: Choice) -> bytes:
        """See ``Dialect.ending``: the one finish reason."""
        ending = ChunkChoice(
            choice.index,
            Delta(),
            finish_reason=_reason(choice),
            kvtide=self.frame.insight(choice),
        )
        return openai.chunk(self.frame, CHUNK, [ending])

    def closing(self, answers: Answers) -> bytes:
        """See ``Dialect.closing``."""
        return openai.closing(self.frame, CHUNK, answers)

    def failure(self, error: ApiError) -> bytes:
        """See ``Dialect.failure``."""
        return openai.failure(error)

    def whole(self, answers: Answers) -> bytes:
        """See ``Dialect.whole``."""
        choices = [
            ChatChoice(
                choice.index,
                _message(choice),
                _reason(choice),
                logprobs=_logprobs(self.frame.tokens(choice, 0, len(choice.ids))),
                token_ids=choice.ids if self.frame.show_ids else UNSET,
                kvtide=self.frame.insight(choice),
            )
            for choice in answers.choices
        ]
        prompt = answers.prompt_ids[0] if self.frame.show_ids else UNSET
        usage = openai.usage_of(answers)
        return openai.whole_body(self.frame, WHOLE, choices, usage, prompt_ids=prompt)


def _reason(choice: Choice) -> str:
    if choice.reason == "stop" and choice.blocks.has_calls:
        return "tool_calls"
    return choice.reason or ""


def _message(choice: Choice) -> ChatMessageReply:
    content = choice.blocks.text_of(BlockKind.CONTENT)
    calls = [
        CallReply(
            CalledFunction(block.text, block.name),
            id=_call_id(choice, block),
            type="function",
        )
        for block in choice.blocks.all
        if block.kind is BlockKind.CALL
    ]
    return ChatMessageReply(
        content if content or not calls else None,
        reasoning_content=choice.blocks.text_of(BlockKind.REASONING) or UNSET,
        tool_calls=calls or UNSET,
    )


def _call_id(choice: Choice, block: Block) -> str:
    return f"call_{choice.call_id(block.call)}"


def _delta(choice: Choice, changes: Sequence[Change]) -> Delta | None:
    """What changed in one delta; None: nothing that clients see."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[CallReply] = []
    for change in changes:
        match change:
            case Opened(block) if block.kind is BlockKind.CALL:
                calls.append(
                    CallReply(
                        CalledFunction("", block.name),
                        index=block.call,
                        id=_call_id(choice, block),
                        type="function",
                    )
                )
            case Grown(block, text):
                match block.kind:
                    case BlockKind.CONTENT:
                        content.append(text)
                    case BlockKind.REASONING:
                        reasoning.append(text)
                    case BlockKind.CALL:
                        calls.append(CallReply(CalledFunction(text), index=block.call))
            case _:
                pass
    if not (content or reasoning or calls):
        return None
    return Delta(
        content="".join(content) if content else UNSET,
        reasoning_content="".join(reasoning) if reasoning else UNSET,
        tool_calls=calls or UNSET,
    )


def token_logprobs(tokens: Sequence[ReportedToken]) -> list[ChatTokenLogprob]:
    """Tokens with their log-probabilities, and what might have been there."""
    return [
        ChatTokenLogprob(
            one.token.text,
            one.token.logprob,
            list(one.token.raw),
            [TokenLogprob(t.text, t.logprob, list(t.raw)) for t in one.top],
        )
        for one in tokens
    ]


def _logprobs(tokens: Sequence[ReportedToken] | None) -> ChatLogprobs | None:
    # a piece may be text alone, that was held back
    return ChatLogprobs(token_logprobs(tokens)) if tokens else None
