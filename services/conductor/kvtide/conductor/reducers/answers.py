"""Answers given of late, so that a repeated question gets the very same one."""

from collections import OrderedDict
from dataclasses import dataclass

from kvtide.conductor.commands import Answer
from kvtide.conductor.limits import ConductorLimits
from kvtide.kv import RequestId


@dataclass(frozen=True, slots=True)
class _Given:
    answer: Answer
    at_s: float


class Answers:
    """The newest answer of each request, bounded in number and age."""

    def __init__(self, limits: ConductorLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._given: OrderedDict[RequestId, _Given] = OrderedDict()

    def __len__(self) -> int:
        """Requests whose answer is remembered."""
        return len(self._given)

    def get(self, request: RequestId) -> Answer | None:
        """What this request was last answered."""
        given = self._given.get(request)
        return given.answer if given is not None else None

    def keep(self, answer: Answer, now_s: float) -> None:
        """Remember an answer in place of the request's earlier one."""
        self._given[answer.request] = _Given(answer, now_s)
        self._given.move_to_end(answer.request)
        while len(self._given) > self._limits.answers:
            self._given.popitem(last=False)

    def forget(self, request: RequestId) -> Answer | None:
        """The request has ended."""
        given = self._given.pop(request, None)
        return given.answer if given is not None else None

    def tick(self, now_s: float) -> None:
        """Time has passed: let go of what is too old."""
        while self._given:
            request, given = next(iter(self._given.items()))
            if now_s - given.at_s <= self._limits.answer_s:
                break
            del self._given[request]

    def clear(self) -> None:
        """Forget all answers."""
        self._given.clear()
