"""Cancels that go on until they are acknowledged."""

from dataclasses import dataclass

from kvtide.bus.messages import Cancel
from kvtide.gateway.life.commands import SendCancel
from kvtide.gateway.life.events import Stage
from kvtide.gateway.life.spec import LifeLimits
from kvtide.kv import NodeRef, RequestId


@dataclass(slots=True)
class _Pending:
    message: Cancel
    next_s: float
    until_s: float


class Cancels:
    """The cancels of one request, at most one for each stage at a life of a worker.

    A cancel is repeated until it is acknowledged, its worker is gone, or it is older
    than the limit; by then the owner lists have done its work.
    """

    def __init__(self, request: RequestId, limits: LifeLimits) -> None:
        """Nothing is to be cancelled yet."""
        self._request = request
        self._limits = limits
        self._pending: dict[tuple[Stage, NodeRef], _Pending] = {}

    def __bool__(self) -> bool:
        """Whether an acknowledgement is outstanding."""
        return bool(self._pending)

    @property
    def wake_s(self) -> float:
        """When ``tick`` next has something to do."""
        return min((p.next_s for p in self._pending.values()), default=float("inf"))

    def start(
        self, stage: Stage, worker: NodeRef, attempt: int, reason: str, now_s: float
    ) -> SendCancel:
        """Cancel ``attempt`` and those before it at ``worker``."""
        message = Cancel(request=self._request, attempt=attempt, reason=reason)
        self._pending[stage, worker] = _Pending(
            message,
            now_s + self._limits.cancel_repeat_s,
            now_s + self._limits.cancel_limit_s,
        )
        return SendCancel(stage, worker, message)

    def acked(self, stage: Stage, worker: NodeRef, attempt: int) -> None:
        """The worker has confirmed a cancel of ``attempt``."""
        pending = self._pending.get((stage, worker))
        if pending is not None and pending.message.attempt <= attempt:
            del self._pending[stage, worker]

    def gone(self, node: NodeRef) -> None:
        """A dead worker holds nothing."""
        for key in [key for key in self._pending if key[1].ends_with(node)]:
            del self._pending[key]

    def tick(self, now_s: float) -> list[SendCancel]:
        """Repeat what is due."""
        again: list[SendCancel] = []
        for (stage, worker), pending in list(self._pending.items()):
            if now_s >= pending.until_s:
                del self._pending[stage, worker]
            elif now_s >= pending.next_s:
                pending.next_s = now_s + self._limits.cancel_repeat_s
                again.append(SendCancel(stage, worker, pending.message))
        return again
