"""Telling prefill workers that they may let go, until they have heard it. Pure."""

from dataclasses import dataclass

from kvtide.decode.events import TellTaken
from kvtide.decode.limits import DecodeLimits
from kvtide.kv import NodeRef, RequestRef


@dataclass(slots=True)
class _Farewell:
    """One that was not acknowledged yet; ``next_s`` is None while it is under way."""

    prefill: NodeRef
    tries: int = 0
    next_s: float | None = None


class Farewells:
    """Repeats each farewell until it is acknowledged, ``taken_tries`` times at most.

    One that is never heard costs no memory for ever: prefill frees what its gateway no
    longer lists.
    """

    def __init__(self, limits: DecodeLimits) -> None:
        """None yet."""
        self._limits = limits
        self._open: dict[RequestRef, _Farewell] = {}

    def __len__(self) -> int:
        """Farewells that were not acknowledged."""
        return len(self._open)

    def say(self, ref: RequestRef, prefill: NodeRef) -> TellTaken:
        """Begin one."""
        self._open[ref] = _Farewell(prefill)
        return TellTaken(ref, prefill)

    def answered(self, ref: RequestRef, *, acked: bool, now_s: float) -> None:
        """One try has ended."""
        farewell = self._open.get(ref)
        if farewell is None:
            return
        farewell.tries += 1
        farewell.next_s = now_s + self._limits.taken_retry_s
        if acked or farewell.tries >= self._limits.taken_tries:
            del self._open[ref]

    def due(self, now_s: float) -> list[TellTaken]:
        """What is to be said again."""
        again: list[TellTaken] = []
        for ref, farewell in self._open.items():
            if farewell.next_s is not None and now_s >= farewell.next_s:
                farewell.next_s = None
                again.append(TellTaken(ref, farewell.prefill))
        return again

    def gone(self, node: NodeRef) -> None:
        """Nobody is there to be told."""
        self._open = {
            ref: farewell
            for ref, farewell in self._open.items()
            if farewell.prefill.node != node.node or farewell.prefill.epoch > node.epoch
        }

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()
