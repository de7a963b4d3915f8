"""Reads a streamed answer line by line: text, usage, and how it ended."""

import msgspec

from kvtide.cli.serve_bench.outcomes import Outcome, Usage

_FIELD = "data:"
_END = "[DONE]"
_MOST_DETAIL = 300


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class Reading:
    """The state of one answer. No line after the end changes it."""

    def __init__(self) -> None:
        """Nothing was read."""
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._text: list[str] = []
        self.arrivals_s: list[float] = []
        self.usage = Usage()
        self.finish_reason = ""
        self.detail = ""
        self._outcome: Outcome | None = None

    @property
    def is_over(self) -> bool:
        """Whether the server has said that no more comes, or said something wrong."""
        return self._outcome is not None

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._text)

    def line(self, line: str, at_s: float) -> None:
        """A line of the stream came at ``at_s``."""
        if self.is_over or not line.startswith(_FIELD):
            return
        data = line[len(_FIELD) :].strip()
        if data == _END:
            self._end()
            return
        try:
            chunk = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            self._fail(Outcome.BAD_ANSWER, f"{error}: {data}")
            return
        if (error := bytes(chunk.error)) not in (b"", b"null"):
            self._fail(Outcome.ERROR_EVENT, error.decode(errors="replace"))
            return
        self._take(chunk, at_s)

    def close(self) -> Outcome:
        """The connection has ended: how the request did.

        A server that gave its finish reason and then ended the stream, as some do
        without ``[DONE]``, has answered.
        """
        if self._outcome is None:
            if self.finish_reason:
                self._end()
            else:
                self._fail(Outcome.CUT, "the stream ended before the answer did")
        assert self._outcome is not None  # noqa: S101 - one of the two said so
        return self._outcome

    def _take(self, chunk: _Chunk, at_s: float) -> None:
        for choice in chunk.choices[:1]:
            delta = choice.delta or _Delta()
            piece = choice.text or delta.content
            if piece:
                self._text.append(piece)
            if piece or delta.reasoning_content or delta.reasoning:
                self.arrivals_s.append(at_s)
            self.finish_reason = choice.finish_reason or self.finish_reason
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self.usage = Usage(
                chunk.usage.prompt_tokens,
                chunk.usage.completion_tokens or 0,
                details.cached_tokens if details else None,
            )

    def _end(self) -> None:
        if self.arrivals_s:
            self._outcome = Outcome.COMPLETED
        else:
            self._fail(Outcome.BAD_ANSWER, "the answer had no text")

    def _fail(self, outcome: Outcome, detail: str) -> None:
        self._outcome = outcome
        self.detail = detail[:_MOST_DETAIL]


def of_status(status: int, body: str) -> tuple[Outcome, str]:
    """What a status other than 200 means."""
    outcome = Outcome.REFUSED if status in (429, 503) else Outcome.HTTP_ERROR
    return outcome, f"{status}: {body}"[:_MOST_DETAIL]
