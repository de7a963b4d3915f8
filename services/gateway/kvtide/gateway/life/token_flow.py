"""The tokens of an answer: in order, without a gap or a repeat, acknowledged."""

from dataclasses import dataclass

from kvtide.bus.messages import (
    FinishReason,
    PullState,
    TokenLogprobs,
    TokenPage,
    Tokens,
)
from kvtide.gateway.life.spec import LifeLimits


@dataclass(frozen=True, slots=True)
class Taken:
    """What an event added: new ids, and the end if it is now known and reached.

    ``logprobs`` are as many as ``ids``, or none.
    """

    ids: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


_NOTHING = Taken((), None)


class TokenFlow:
    """Follows one attempt's token events on top of what earlier attempts brought.

    The owner keeps the tokens; ``have`` is their number. Events may be lost, repeated
    and reordered in any way: only what fits at ``have`` is taken, and a gap or a
    silence asks for a pull.
    """

    def __init__(self, have: int, limits: LifeLimits) -> None:
        """Expect index ``have`` next; nothing is awaited until ``listen``."""
        self.have = have
        self._limits = limits
        self._acked = have
        self._ack_s = float("inf")
        self._pull_s = float("inf")
        self._pulled_s = float("-inf")
        self._heard_s = float("inf")

    @property
    def wake_s(self) -> float:
        """When a pull, an acknowledgement or giving up is next due."""
        return min(self._ack_s, self._pull_s, self._heard_s + self._limits.unanswered_s)

    def listen(self, now_s: float) -> None:
        """The worker has the work: from now on silence means something."""
        if self._heard_s == float("inf"):
            self.heard(now_s)

    def heard(self, now_s: float) -> None:
        """The worker gave a sign about this request."""
        self._heard_s = now_s
        self._pull_s = now_s + self._limits.silence_s

    def dead(self, now_s: float) -> bool:
        """Whether the worker left even pulls unanswered for too long."""
        return now_s >= self._heard_s + self._limits.unanswered_s

    def tokens(self, event: Tokens, now_s: float) -> Taken:
        """Take what ``event`` adds; after a gap a pull is due at once."""
        self.heard(now_s)
        return self._take(event, event.finish, now_s)

    def page(self, page: TokenPage, now_s: float) -> Taken:
        """Take what a pulled page adds."""
        self.heard(now_s)
        finish = page.finish if page.state is PullState.FINISHED else None
        return self._take(page, finish, now_s)

    def _take(
        self,
        said: Tokens | TokenPage,
        finish: FinishReason | None,
        now_s: float,
    ) -> Taken:
        index, ids = said.index, said.ids
        if index > self.have:
            # a burst behind one gap asks once
            self._pull_s = max(now_s, self._pulled_s + self._limits.pull_patience_s)
            return _NOTHING
        fresh = ids[self.have - index :]
        logprobs = said.logprobs[self.have - index :]
        end = index + len(ids)
        if not fresh and finish is None:
            return _NOTHING
        self.have += len(fresh)
        if fresh and self._ack_s == float("inf"):
            self._ack_s = now_s + self._limits.ack_s
        if self.have - self._acked >= self._limits.ack_tokens:
            self._ack_s = now_s
        # an old event that is repeated late may not end what went on after it
        return Taken(fresh, finish if end == self.have else None, logprobs)

    def pull_due(self, now_s: float) -> bool:
        """Whether to send a ``TokenPull`` now; counts it as sent."""
        if now_s < self._pull_s:
            return False
        self._pulled_s = now_s
        self._pull_s = now_s + self._limits.pull_patience_s
        return True

    def ack_due(self, now_s: float) -> bool:
        """Whether to send a ``TokenAck`` now; counts it as sent."""
        if now_s < self._ack_s:
            return False
        self._acked = self.have
        self._ack_s = float("inf")
        return True
