"""The answers to one client's request, as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from blake3 import blake3

from kvtide.bus.messages import CandidateEstimate, FinishReason
from kvtide.gateway.api.asking import Questions
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.replies import Insight
from kvtide.gateway.api.token_report import TokenReport
from kvtide.gateway.errors import RequestFailedError
from kvtide.gateway.life import AnswerCommand, Began, Emit, Fail, Finish, Stage, Usage
from kvtide.gateway.reading import THINK_END, AnswerReader, Blocks, Change
from kvtide.gateway.session import AnswerChannel, Session
from kvtide.gateway.text import AnswerText

_CALL_ID_BYTES = 12


@dataclass(slots=True)
class Choice:
    """One answer so far."""

    index: int
    session: Session
    report: TokenReport
    sink: AnswerText
    reader: AnswerReader
    blocks: Blocks = field(default_factory=Blocks)
    ids: list[int] = field(default_factory=list[int])
    reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self.sink.stopped_by

    def call_id(self, call: int) -> str:
        """What tells its call number ``call`` from all others: 24 hex digits."""
        digest = blake3(f"{self.session.request}\0{call}".encode())
        return digest.hexdigest(length=_CALL_ID_BYTES)

    @property
    def insight(self) -> Insight:
        """How it was made."""
        workers = self.session.life.workers
        prefill = workers.get(Stage.PREFILL)
        decode = workers.get(Stage.DECODE)
        return Insight(
            request=self.session.request,
            attempt=self.session.life.attempt,
            prefill=prefill.node if prefill else "",
            decode=decode.node if decode else "",
            hit_tokens=self.usage.cached_tokens if self.usage else 0,
            queue_ms=self.session.life.queue_ms,
        )

    @property
    def estimate(self) -> CandidateEstimate | None:
        """What its conductor expects of its placement."""
        return self.session.life.estimate


@dataclass(frozen=True, slots=True)
class Said:
    """What came of an answer, and what it changes in its blocks."""

    choice: Choice
    command: AnswerCommand
    changes: Sequence[Change] = ()


class Answers:
    """Submits the questions and follows the answers. Use as a context manager.

    Leaving it cancels whatever has not ended.
    """

    def __init__(self, door: Door, questions: Questions) -> None:
        """Nothing is submitted before it is entered."""
        self._door = door
        self._questions = questions
        self._channel = AnswerChannel()
        self.choices: list[Choice] = []

    @property
    def is_done(self) -> bool:
        """Whether every answer is finished."""
        return all(choice.reason is not None for choice in self.choices)

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The prompt of each answer."""
        return [list(item.spec.prompt) for item in self._questions.items]

    @property
    def usage(self) -> Usage:
        """The cost of all; a prompt counts once, whatever ``n`` is."""
        per_prompt = self._questions.per_prompt
        usages = [choice.usage or Usage(0, 0, 0) for choice in self.choices]
        prompts = usages[::per_prompt]
        return Usage(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.output_tokens for usage in usages),
            sum(usage.cached_tokens for usage in prompts),
        )

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning, its closing tag included; None: the model never thinks.

        Those of an answer that ended within its reasoning are all its tokens.
        """
        thinking = self._questions.reading.thinking
        if thinking is None:
            return None
        table = self._door.served.text.table
        end = THINK_END.encode()
        count = 0
        for choice in self.choices:
            raw = bytearray()
            thought = 0
            for number, token in enumerate(choice.ids, 1):
                raw += table.of(token)
                if end in raw[-len(end) - 64 :]:
                    thought = number
                    break
            opened = thinking.begun or choice.blocks.has_reasoning
            count += (thought or len(choice.ids)) if opened else 0
        return count

    async def take(self, timeout_s: float) -> Sequence[Said]:
        """What has come, in order, and noted in its choice; none after ``timeout_s``.

        Raises:
            RequestFailedError: an answer failed; what came before it is lost.
        """
        taken: list[Said] = []
        for index, command in await self._channel.take(timeout_s):
            if isinstance(command, Fail):
                if taken:
                    self._channel.put(index, command)
                    return taken
                raise RequestFailedError(command.failure)
            taken.append(_noted(self.choices[index], command))
        return taken

    def __enter__(self) -> Self:
        """Submit all.

        Raises:
            UnavailableError, NameTakenError: see ``Gateway.submit``; none is open then.
        """
        self._door.gateway.check_room(len(self._questions.items))
        try:
            self._submit_all()
        except BaseException:
            self._leave()
            raise
        return self

    def _submit_all(self) -> None:
        gateway, served = self._door.gateway, self._door.served
        reading = self._questions.reading
        for item in self._questions.items:
            text = served.text.answer(
                self._questions.stops, min_tokens=item.spec.min_new_tokens
            )

            def put(command: AnswerCommand, index: int = item.index) -> None:
                self._channel.put(index, command)

            session = gateway.submit(item.spec, self._questions.space, text, put)
            report, reader = TokenReport(served.text), reading.reader()
            self.choices.append(Choice(item.index, session, report, text, reader))

    def _leave(self) -> None:
        for choice in self.choices:
            choice.session.leave()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave every answer."""
        self._leave()


def _noted(choice: Choice, command: Began | Emit | Finish) -> Said:
    match command:
        case Began():
            return Said(choice, command)
        case Emit():
            choice.ids += command.ids
            choice.report.add(command.ids, command.logprobs)
            parts = choice.reader.push(command.text)
            return Said(choice, command, choice.blocks.add(parts))
        case Finish():
            choice.reason = command.reason
            choice.usage = command.usage
            rest = choice.blocks.add(choice.reader.finish())
            return Said(choice, command, [*rest, *choice.blocks.close()])
