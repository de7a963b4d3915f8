"""The answers to one client's request, as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvtide.bus.messages import CandidateEstimate, FinishReason
from kvtide.gateway.api.asking import Questions
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.replies import Insight, UsageReply
from kvtide.gateway.api.token_report import TokenReport
from kvtide.gateway.errors import RequestFailedError
from kvtide.gateway.life import AnswerCommand, Began, Emit, Fail, Finish, Stage, Usage
from kvtide.gateway.session import AnswerChannel, Session


@dataclass(slots=True)
class Choice:
    """One answer so far."""

    index: int
    session: Session
    report: TokenReport
    text: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    reason: FinishReason | None = None
    usage: Usage | None = None

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
    def usage(self) -> UsageReply:
        """The cost of all; a prompt counts once, whatever ``n`` is."""
        per_prompt = self._questions.per_prompt
        usages = [choice.usage or Usage(0, 0, 0) for choice in self.choices]
        first = [
            usage if i % per_prompt == 0 else Usage(0, usage.output_tokens, 0)
            for i, usage in enumerate(usages)
        ]
        return UsageReply.of(first)

    async def take(self, timeout_s: float) -> Sequence[tuple[Choice, AnswerCommand]]:
        """What has come, in order, and noted in its choice; none after ``timeout_s``.

        Raises:
            RequestFailedError: an answer failed; what came before it is lost.
        """
        taken: list[tuple[Choice, AnswerCommand]] = []
        for index, command in await self._channel.take(timeout_s):
            choice = self.choices[index]
            match command:
                case Began():
                    pass
                case Emit():
                    choice.text.append(command.text)
                    choice.ids += command.ids
                    choice.report.add(command.ids, command.logprobs)
                case Finish():
                    choice.reason = command.reason
                    choice.usage = command.usage
                case Fail():
                    if taken:
                        self._channel.put(index, command)
                        return taken
                    raise RequestFailedError(command.failure)
            taken.append((choice, command))
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
        for item in self._questions.items:
            text = served.text.answer(
                self._questions.stops, min_tokens=item.spec.min_new_tokens
            )

            def put(command: AnswerCommand, index: int = item.index) -> None:
                self._channel.put(index, command)

            session = gateway.submit(item.spec, self._questions.space, text, put)
            report = TokenReport(served.text)
            self.choices.append(Choice(item.index, session, report))

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
