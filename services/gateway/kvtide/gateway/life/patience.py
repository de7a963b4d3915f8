"""How often a request may be placed, and how long it may wait for that. Pure."""

from kvtide.gateway.life.losses import Loss, LossKind
from kvtide.gateway.life.spec import FailureKind, LifeLimits, RequestFailure

_GROWTH = 2.0


class Patience:
    """Counts a request's placements, and bounds its wait for the next one.

    A request that nobody has taken yet is not patient: what keeps it from being placed
    ends it at once. After a loss it is: it waits for workers and conductors to come
    back, until ``again_limit_s`` after that loss. Only placements that ran count
    towards ``LifeLimits.placements`` then.

    A request is held to kill its workers if ``LifeLimits.deaths`` of them died with it
    one after the other and no token came between: what kills does so at the same place
    again, while one whose workers are lost by others' faults gets on in between.
    """

    def __init__(self, limits: LifeLimits) -> None:
        """Nothing was lost yet."""
        self._limits = limits
        self._placed = 0
        self._ran = 0
        self._died = 0
        self._deaths_in_a_row = 0
        self._answered = 0
        self._until_s: float | None = None
        self._pause_s = limits.again_first_s

    @property
    def waits(self) -> bool:
        """Whether a lost placement is to be made good."""
        return self._until_s is not None

    def placed(self) -> None:
        """A conductor has chosen workers."""
        self._placed += 1

    def taken(self) -> None:
        """Workers have the request: the wait is over."""
        self._until_s = None
        self._pause_s = self._limits.again_first_s

    def lost(
        self, loss: Loss, *, ran: bool, answered: int, now_s: float
    ) -> RequestFailure | None:
        """A placement came to nothing; the answer if it was the last one.

        ``answered`` are the tokens that have come of all placements so far.
        """
        if loss.kind is LossKind.UNABLE:
            if not self._ran:
                return loss.failure
            # it was under way: that a worker was lost is not the client's error
            return RequestFailure(FailureKind.WORKERS_FAILED, loss.failure.reason)
        limit = self._limits.placements
        self._ran += ran
        if ran and loss.kind is LossKind.DIED and self._kills(answered):
            return RequestFailure(
                FailureKind.QUARANTINED,
                f"{self._died} workers died with this request, so it is refused for a "
                "while",
            )
        if self._ran >= limit:
            return loss.failure
        if not self.waits and (self._ran or loss.kind is not LossKind.BUSY):
            self._until_s = now_s + self._limits.again_limit_s
        if not self.waits and self._placed >= limit:
            return loss.failure
        return None

    def _kills(self, answered: int) -> bool:
        """One more worker has died: whether the request is what they die of."""
        self._died += 1
        self._deaths_in_a_row += 1
        if answered > self._answered:
            self._answered, self._deaths_in_a_row = answered, 1
        limits = self._limits
        return self._deaths_in_a_row >= limits.deaths or self._died >= limits.placements

    def over(self, now_s: float) -> bool:
        """Whether it has waited for long enough, or may not wait at all."""
        return self._until_s is None or now_s >= self._until_s

    def pause_s(self) -> float:
        """How long to wait before the next question; grows up to a second or so."""
        pause_s = self._pause_s
        self._pause_s = min(pause_s * _GROWTH, self._limits.again_most_s)
        return pause_s

    def afresh_s(self) -> float:
        """Something has changed: how long to wait now; the next waits grow again."""
        self._pause_s = self._limits.again_first_s
        return self._pause_s / _GROWTH
