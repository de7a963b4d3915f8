"""OpenAI's responses, whole or as numbered, named events."""

from collections.abc import Iterator
from typing import Any, assert_never

import msgspec

from kvtide.gateway.api.answers import Answers, Choice, Said
from kvtide.gateway.api.chat_dialect import token_logprobs
from kvtide.gateway.api.dialect import UNSET, Frame, named_event
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.api.replies import ChatTokenLogprob
from kvtide.gateway.api.responses import replies
from kvtide.gateway.api.responses.schemas import ResponsesBody
from kvtide.gateway.life import Emit
from kvtide.gateway.reading import (
    Block,
    BlockKind,
    Closed,
    Grown,
    Opened,
)

_DELTAS = {
    BlockKind.CONTENT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}
_PREFIXES = {
    BlockKind.CONTENT: "msg",
    BlockKind.REASONING: "rs",
    BlockKind.CALL: "fc",
}


class ResponsesDialect:
    """See ``Dialect``. There is one answer, whose blocks are the output's items."""

    def __init__(self, frame: Frame, body: ResponsesBody) -> None:
        """Share ``frame`` in all pieces; what ``body`` asked for is told again."""
        self.frame = frame
        self._body = body
        self._number = 0

    def opening(self, answers: Answers) -> bytes:
        """See ``Dialect.opening``."""
        (choice,) = answers.choices
        return b"".join(
            self._response(f"response.{word}", choice, None)
            for word in ("created", "in_progress")
        )

    def piece(self, said: Said) -> bytes:
        """See ``Dialect.piece``."""
        return b"".join(self._events(said))

    def ending(self, choice: Choice) -> bytes:
        """See ``Dialect.ending``: told with the cost, in ``closing``."""
        del choice
        return b""

    def closing(self, answers: Answers) -> bytes:
        """See ``Dialect.closing``."""
        (choice,) = answers.choices
        return self._response(f"response.{_status(choice)}", choice, _usage(answers))

    def failure(self, error: ApiError) -> bytes:
        """See ``Dialect.failure``."""
        details = replies.FailureDetails(
            str(error), error.kind, error.param, error.code
        )
        event = replies.FailureEvent(
            "error", self._next(), error.code, str(error), error.param, details
        )
        return named_event("error", event)

    def whole(self, answers: Answers) -> bytes:
        """See ``Dialect.whole``."""
        (choice,) = answers.choices
        return msgspec.json.encode(self._reply(choice, _usage(answers)))

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    def _response(
        self, name: str, choice: Choice, usage: replies.UsageReply | None
    ) -> bytes:
        reply = self._reply(choice, usage)
        return named_event(name, replies.ResponseEvent(name, self._next(), reply))

    def _reply(
        self, choice: Choice, usage: replies.UsageReply | None
    ) -> replies.ResponseReply:
        body = self._body
        status = _status(choice)
        cut = replies.Incomplete("max_output_tokens")
        choice_said = body.tool_choice or "auto"
        return replies.ResponseReply(
            id=self.frame.id,
            created_at=self.frame.created,
            status=status,
            model=self.frame.model,
            output=[self._item(choice, block) for block in choice.blocks.all],
            usage=usage,
            incomplete_details=cut if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            text=_text_config(body),
            tool_choice=choice_said
            if isinstance(choice_said, str)
            else choice_said.model_dump(),
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            user=body.user,
        )

    # ---- items

    def _item_id(self, block: Block) -> str:
        digits = self.frame.id.removeprefix("resp_")
        return f"{_PREFIXES[block.kind]}_{digits}_{block.index}"

    def _item(
        self, choice: Choice, block: Block, status: str | None = None
    ) -> replies.Item:
        last = block.index == len(choice.blocks.all) - 1
        said = status or (_status(choice) if last else "completed")
        name, text = self._item_id(block), block.text if status is None else ""
        match block.kind:
            case BlockKind.CONTENT:
                content = [self._part(choice, text)] if status is None else []
                return replies.MessageItem(name, said, content)
            case BlockKind.REASONING:
                thoughts = [replies.ReasoningPart(text)] if status is None else []
                return replies.ReasoningItem(name, said, thoughts)
            case BlockKind.CALL:
                call_id = f"call_{choice.call_id(block.call)}"
                return replies.CallItem(name, call_id, block.name, text, said)

    def _part(self, choice: Choice, text: str) -> replies.TextPart:
        tokens = self._logprobs(choice, 0, len(choice.ids)) if text else []
        return replies.TextPart(text, logprobs=tokens)

    def _logprobs(self, choice: Choice, start: int, end: int) -> list[ChatTokenLogprob]:
        return token_logprobs(self.frame.tokens(choice, start, end) or ())

    # ---- events

    def _events(self, said: Said) -> Iterator[bytes]:
        for change in said.changes:
            match change:
                case Opened(block):
                    yield from self._opened(said.choice, block)
                case Grown(block, text):
                    yield self._grown(said, block, text)
                case Closed(block):
                    yield from self._closed(said.choice, block)
                case _:
                    assert_never(change)

    def _opened(self, choice: Choice, block: Block) -> Iterator[bytes]:
        item = self._item(choice, block, "in_progress")
        yield self._item_event("response.output_item.added", block, item)
        if block.kind is not BlockKind.CALL:
            empty = _empty_part(block)
            yield self._part_event("response.content_part.added", block, empty)

    def _grown(self, said: Said, block: Block, text: str) -> bytes:
        emit = said.command
        logprobs: list[ChatTokenLogprob] | msgspec.UnsetType = UNSET
        if block.kind is BlockKind.CONTENT:
            span = (
                (emit.index, emit.index + len(emit.ids))
                if isinstance(emit, Emit)
                else (0, 0)
            )
            logprobs = self._logprobs(said.choice, *span)
        name = f"{_DELTAS[block.kind]}.delta"
        event = replies.DeltaEvent(
            name,
            self._next(),
            self._item_id(block),
            block.index,
            text,
            UNSET if block.kind is BlockKind.CALL else 0,
            logprobs,
        )
        return named_event(name, event)

    def _closed(self, choice: Choice, block: Block) -> Iterator[bytes]:
        item = self._item(choice, block)
        name = f"{_DELTAS[block.kind]}.done"
        is_call = block.kind is BlockKind.CALL
        done = replies.DoneEvent(
            name,
            self._next(),
            self._item_id(block),
            block.index,
            text=UNSET if is_call else block.text,
            arguments=block.text if is_call else UNSET,
            name=block.name if is_call else UNSET,
            content_index=UNSET if is_call else 0,
            logprobs=[] if block.kind is BlockKind.CONTENT else UNSET,
        )
        yield named_event(name, done)
        if not isinstance(item, replies.CallItem):
            part = item.content[0]
            yield self._part_event("response.content_part.done", block, part)
        yield self._item_event("response.output_item.done", block, item)

    def _item_event(self, name: str, block: Block, item: replies.Item) -> bytes:
        event = replies.ItemEvent(name, self._next(), block.index, item)
        return named_event(name, event)

    def _part_event(
        self, name: str, block: Block, part: replies.TextPart | replies.ReasoningPart
    ) -> bytes:
        event = replies.PartEvent(
            name, self._next(), self._item_id(block), block.index, part
        )
        return named_event(name, event)


def _empty_part(block: Block) -> replies.TextPart | replies.ReasoningPart:
    if block.kind is BlockKind.REASONING:
        return replies.ReasoningPart("")
    return replies.TextPart("")


def _status(choice: Choice) -> str:
    if choice.reason is None:
        return "in_progress"
    return "incomplete" if choice.reason == "length" else "completed"


def _usage(answers: Answers) -> replies.UsageReply:
    return replies.UsageReply.of(answers.usage, answers.reasoning_tokens or 0)


def _text_config(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    form = {"type": "text"} if given is None else given.model_dump(by_alias=True)
    return {"format": form}
