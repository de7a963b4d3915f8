"""The answer as it grows: tokens in order, their text, its end, its cost. Pure."""

from dataclasses import dataclass
from typing import assert_never

from kvtide.bus.messages import (
    DecodeFailed,
    FinishReason,
    Outcome,
    PrefillDone,
    PrefillFailed,
    PullState,
    RequestEnded,
    TokenAck,
    TokenPage,
    TokenPull,
    Tokens,
)
from kvtide.gateway.life.attempt import Attempt, Work, WorkState
from kvtide.gateway.life.book import Book
from kvtide.gateway.life.commands import (
    Command,
    Emit,
    Finish,
    SendTokenAck,
    SendTokenPull,
)
from kvtide.gateway.life.events import PullAnswered, Stage, StreamEvent
from kvtide.gateway.life.losses import Loss
from kvtide.gateway.life.spec import LifeLimits, RequestSpec, Usage
from kvtide.gateway.life.text_sink import TextSink
from kvtide.gateway.life.token_flow import Taken, TokenFlow
from kvtide.kv import NodeRef


@dataclass(frozen=True, slots=True)
class Heard:
    """What a worker's message changed.

    ``decode_done``: decode itself ended the answer; else the gateway did (a stop
    string), and decode must be told.
    """

    emits: tuple[Emit, ...] = ()
    finish: FinishReason | None = None
    decode_done: bool = False
    lost: Loss | None = None


class Answer:
    """One answer over all attempts. Its life decides, this counts."""

    def __init__(self, spec: RequestSpec, text: TextSink, limits: LifeLimits) -> None:
        """Empty."""
        self.book = Book(spec)
        self.tokens: list[int] = []
        self._spec = spec
        self._text = text
        self._limits = limits
        self._flow = TokenFlow(0, limits)
        # the worker's own end list does not hold while it ignores ends
        self._own_stops = frozenset(spec.stop_token_ids) if spec.ignore_eos else ()

    @property
    def usage(self) -> Usage:
        """The cost so far."""
        return self.book.usage(len(self.tokens))

    @property
    def wake_s(self) -> float:
        """When ``tick`` or ``is_dead`` next changes."""
        return self._flow.wake_s

    def restart(self) -> None:
        """A new attempt goes on after the tokens that are here."""
        self._flow = TokenFlow(len(self.tokens), self._limits)

    def listen(self, now_s: float) -> None:
        """Decode has the work: silence counts from now."""
        self._flow.listen(now_s)

    def is_dead(self, now_s: float) -> bool:
        """Whether decode left even pulls unanswered."""
        return self._flow.dead(now_s)

    def tick(self, attempt: int, decode: NodeRef, now_s: float) -> list[Command]:
        """Acknowledge and pull what is due."""
        commands: list[Command] = []
        request = self._spec.request
        if self._flow.ack_due(now_s):
            ack = TokenAck(
                request=request, attempt=attempt, choice=0, index=self._flow.have
            )
            commands.append(SendTokenAck(decode, ack))
        if self._flow.pull_due(now_s):
            pull = TokenPull(
                request=request, attempt=attempt, choice=0, index=self._flow.have
            )
            commands.append(SendTokenPull(decode, pull))
        return commands

    def hear(self, attempt: Attempt, event: StreamEvent, now_s: float) -> Heard | None:
        """Take a worker's message; None if it is stale or says nothing of tokens."""
        paged = isinstance(event, PullAnswered)
        message = event.page if paged else event.message
        sender = event.worker if paged else event.sender
        if message.attempt != attempt.number:
            return None
        if isinstance(message, PrefillDone | PrefillFailed):
            prefill = attempt.of(Stage.PREFILL, sender)
            if prefill is not None and prefill.state is not WorkState.OVER:
                self._prefill_said(attempt, prefill, message)
            return None
        work = attempt.of(Stage.DECODE, sender)
        if work is None:
            return None
        match message:
            case TokenPage():
                return self._page(attempt, work, message, now_s)
            case DecodeFailed():
                return Heard(lost=Loss.given_up(message))
            case Tokens():
                return self._tokens(attempt, work, message, now_s)
            case _:
                assert_never(message)

    def _prefill_said(
        self, attempt: Attempt, work: Work, message: PrefillDone | PrefillFailed
    ) -> None:
        if isinstance(message, PrefillDone):
            # it keeps its slots until decode has them: still owned
            work.state = WorkState.TAKEN
            self.book.reused(attempt.number, message.reused_tokens)
            self.book.queue_ms = message.times.queue_ms
        else:
            work.state = WorkState.OVER

    def _tokens(
        self, attempt: Attempt, work: Work, message: Tokens, now_s: float
    ) -> Heard:
        self.book.reused(attempt.number, message.reused_tokens)
        self.book.prompt(message.prompt_tokens)
        taken = self._flow.tokens(message, now_s)
        return self._take(attempt, work, taken, now_s)

    def _page(
        self, attempt: Attempt, work: Work, page: TokenPage, now_s: float
    ) -> Heard | None:
        match page.state:
            case PullState.UNKNOWN:
                if work.state is WorkState.SENT:
                    return None  # the work may still be on its way
                return Heard(lost=Loss.failed("decode does not know the request"))
            case PullState.FAILED:
                return Heard(lost=Loss.failed(page.reason))
            case PullState.WAITING | PullState.RUNNING | PullState.FINISHED:
                self.book.reused(attempt.number, page.reused_tokens)
                self.book.prompt(page.prompt_tokens)
                taken = self._flow.page(page, now_s)
                return self._take(attempt, work, taken, now_s)
            case _:
                assert_never(page.state)

    def _take(
        self, attempt: Attempt, decode: Work, taken: Taken, now_s: float
    ) -> Heard:
        if decode.state is WorkState.SENT:
            decode.state = WorkState.TAKEN
        if not taken.ids:
            return Heard(finish=taken.finish, decode_done=taken.finish is not None)
        self.book.token(now_s)
        prefill = attempt.works.get(Stage.PREFILL)
        if prefill is not None:
            # decode generates, so it has all that prefill made
            prefill.state = WorkState.OVER
        return self._append(taken)

    def _append(self, taken: Taken) -> Heard:
        """Token by token, so that the end never depends on how tokens were batched."""
        start = len(self.tokens)
        text: list[str] = []
        stopped: FinishReason | None = None
        for token in taken.ids:
            if (
                token in self._own_stops
                and len(self.tokens) >= self._spec.min_new_tokens
            ):
                stopped = FinishReason.STOP
                break
            self.tokens.append(token)
            text.append(self._text.push(token))
            if self._text.hit:
                stopped = FinishReason.STOP
                break
            if len(self.tokens) >= self._spec.max_new_tokens:
                stopped = taken.finish or FinishReason.LENGTH
                break
        ids = tuple(self.tokens[start:])
        emit = Emit(start, ids, "".join(text), taken.logprobs[: len(ids)])
        emits = (emit,) if emit.ids else ()
        ended = taken.finish is not None
        return Heard(emits, stopped or taken.finish, decode_done=ended)

    def finish(self, reason: FinishReason) -> list[Command]:
        """The held-back text, then the terminal answer."""
        rest = "" if self._text.hit else self._text.finish()
        end = Finish(reason, self.usage)
        if not rest:
            return [end]
        return [Emit(len(self.tokens), (), rest), end]

    def final_ack(self, attempt: Attempt | None) -> list[Command]:
        """Let decode forget the answer, if it is its own end that was reached."""
        work = attempt.works.get(Stage.DECODE) if attempt is not None else None
        if attempt is None or work is None or work.state is not WorkState.OVER:
            return []
        ack = TokenAck(
            request=self._spec.request,
            attempt=attempt.number,
            choice=0,
            index=len(self.tokens),
            finished=True,
        )
        return [SendTokenAck(work.worker, ack)]

    def record(
        self, outcome: Outcome, code: str, attempt: int, now_s: float
    ) -> RequestEnded:
        """The closing line of the book."""
        return self.book.record(
            outcome,
            code,
            attempt=attempt,
            output_tokens=len(self.tokens),
            now_s=now_s,
        )
