"""How requests ended: each exactly once."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvtide.cli.serve_bench.errors import EndedTwiceError
from kvtide.cli.serve_bench.workload import Conversation


class Outcome(StrEnum):
    """How a request ended; ``COMPLETED`` is the only good one."""

    COMPLETED = "completed"
    REFUSED = "refused"  # 429 or 503: no room
    HTTP_ERROR = "http_error"  # another status
    ERROR_EVENT = "error_event"  # an error in the stream
    CUT = "cut"  # the stream ended without its end
    BAD_ANSWER = "bad_answer"  # not what OpenAI's API sends
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"  # no connection, or it broke
    SKIPPED = "skipped"  # the turn before failed
    INTERRUPTED = "interrupted"  # the load was stopped


@dataclass(frozen=True, slots=True)
class Usage:
    """As the server counted; ``cached_tokens`` is None where it does not say."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and what came of it. Seconds count from the start of the load.

    ``arrivals_s`` are the times of pieces of text. ``due_s`` is when the request
    should have been sent: what delayed it is part of its time to first token.
    """

    conversation: int
    turn: int
    outcome: Outcome
    asked_tokens: int
    due_s: float | None = None
    sent_s: float | None = None
    ended_s: float | None = None
    arrivals_s: tuple[float, ...] = ()
    usage: Usage = Usage()
    detail: str = ""
    finish_reason: str = ""


class Ledger:
    """Every turn of a load, and its one outcome."""

    def __init__(self, conversations: Iterable[Conversation]) -> None:
        """Nothing has ended."""
        self._open = {
            (each.number, turn): ask.output_tokens
            for each in conversations
            for turn, ask in enumerate(each.turns)
        }
        self._ended: list[Exchange] = []

    def end(self, exchange: Exchange) -> None:
        """Book it.

        Raises:
            EndedTwiceError: it has ended, or was never to be asked.
        """
        key = (exchange.conversation, exchange.turn)
        if self._open.pop(key, None) is None:
            raise EndedTwiceError(*key)
        self._ended.append(exchange)

    def skip_rest(self, conversation: Conversation, after: int) -> None:
        """A turn failed: those behind it can't be asked."""
        for turn in range(after + 1, len(conversation.turns)):
            asked = conversation.turns[turn].output_tokens
            self.end(Exchange(conversation.number, turn, Outcome.SKIPPED, asked))

    def close(self) -> tuple[Exchange, ...]:
        """All outcomes in the order of the load; what is open was interrupted."""
        for (number, turn), asked in list(self._open.items()):
            self.end(Exchange(number, turn, Outcome.INTERRUPTED, asked))
        return tuple(
            sorted(self._ended, key=lambda each: (each.conversation, each.turn))
        )
