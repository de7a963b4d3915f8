"""The text of one answer: detokenised, ended by its stop strings."""

from collections.abc import Sequence

from kvtide.gateway.text.detokenizer import Detokenizer
from kvtide.gateway.text.stops import StopStrings
from kvtide.gateway.text.token_bytes import TokenBytes


class AnswerText:
    """The gateway's ``TextSink``.

    ``min_tokens``: the text of this many first tokens is not searched for stop
    strings (a client that asks for a least length gets it).
    """

    def __init__(
        self, table: TokenBytes, stops: Sequence[str], *, min_tokens: int = 0
    ) -> None:
        """Start an answer."""
        self._detokenizer = Detokenizer(table)
        self._stops = StopStrings(stops)
        self._unsearched = min_tokens

    @property
    def hit(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.hit is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.hit

    def push(self, token: int) -> str:
        """See ``TextSink.push``."""
        text = self._detokenizer.push(token)
        if self._unsearched > 0:
            self._unsearched -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """See ``TextSink.finish``."""
        rest = self._stops.push(self._detokenizer.flush())
        return rest + self._stops.flush()
