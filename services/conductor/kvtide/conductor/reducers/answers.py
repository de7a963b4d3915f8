"""Answers given of late, so that a repeated question gets the very same one."""

from collections import OrderedDict
from dataclasses import dataclass

from kvtide.bus.messages import Admit
from kvtide.conductor.commands import Answer
from kvtide.conductor.limits import ConductorLimits
from kvtide.kv import BlockKey, NodeRef, RequestId, TenantId


@dataclass(frozen=True, slots=True)
class Asked:
    """What tells one request from another, should two have the same name.

    The last key names all full blocks, for each key is made with the one before it.
    """

    gateway: NodeRef
    tenant: TenantId
    model: str
    last_key: BlockKey | None
    prompt_tokens: int

    @classmethod
    def of(cls, admit: Admit) -> "Asked":
        """What ``admit`` asks for; the same for all repeats of an attempt."""
        return cls(
            gateway=admit.gateway,
            tenant=admit.tenant,
            model=admit.model,
            last_key=admit.keys[-1] if admit.keys else None,
            prompt_tokens=admit.prompt_tokens,
        )


@dataclass(frozen=True, slots=True)
class Given:
    """An answer, and what it answers."""

    answer: Answer
    asked: Asked
    at_s: float


class Answers:
    """The newest answer of each request, bounded in number and age."""

    def __init__(self, limits: ConductorLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._given: OrderedDict[RequestId, Given] = OrderedDict()

    def __len__(self) -> int:
        """Requests whose answer is remembered."""
        return len(self._given)

    def get(self, request: RequestId) -> Given | None:
        """What this request was last answered."""
        return self._given.get(request)

    def keep(self, admit: Admit, answer: Answer, now_s: float) -> None:
        """Remember an answer in place of the request's earlier one."""
        self._given[answer.request] = Given(answer, Asked.of(admit), now_s)
        self._given.move_to_end(answer.request)
        while len(self._given) > self._limits.answers:
            self._given.popitem(last=False)

    def forget(self, request: RequestId) -> Given | None:
        """The request has ended."""
        return self._given.pop(request, None)

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
