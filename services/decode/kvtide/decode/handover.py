"""What decode knows of a prefill that works for it; messages that came too early. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvtide.bus.messages import (
    HandoverPlan,
    HandoverState,
    PartsReady,
    PrefillDone,
    PrefillFailed,
)
from kvtide.decode.arrival import Arrival
from kvtide.decode.limits import DecodeLimits
from kvtide.kv import NodeRef, RequestRef

Said = HandoverPlan | PartsReady | PrefillDone | PrefillFailed


class Handover:
    """One request's hand-over, as far as it was heard.

    ``over`` once nothing more will come: all was said and heard, prefill failed, is
    gone, or has not answered ``asks`` questions running. Without a prefill it is over
    from the start.
    """

    def __init__(
        self, prefill: NodeRef | None, arrival: Arrival, limits: DecodeLimits
    ) -> None:
        """Hear for ``arrival``."""
        self.prefill = prefill
        self._arrival = arrival
        self._limits = limits
        self._over = prefill is None
        self._done: PrefillDone | None = None
        self._heard_s = 0.0
        self._asking = False
        self._unanswered = 0

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        if self._over or self._done is None:
            return self._over
        return not (
            self._arrival.plan is None
            or self._arrival.lacks_messages(self._done.messages)
        )

    def begin(self, now_s: float) -> None:
        """Silence counts from now."""
        self._heard_s = now_s

    def hear(self, said: Said, now_s: float) -> None:
        """Prefill says something; another life's word is none."""
        if said.prefill != self.prefill:
            return
        self._heard_s = now_s
        match said:
            case HandoverPlan():
                self._arrival.planned(said)
            case PartsReady():
                self._arrival.announced(said.seq, said.parts)
            case PrefillDone():
                self._done = said
            case PrefillFailed():
                self._over = True

    def gone(self, node: NodeRef) -> bool:
        """This life of a node has ended: was it ours?"""
        if self.prefill is None or not self.prefill.ends_with(node):
            return False
        self._over = True
        return True

    def ask(self, now_s: float) -> bool:
        """Whether the state is to be pulled now; ``answered`` ends it."""
        if self.over or self._asking:
            return False
        behind = self._done is not None and self._unanswered == 0
        if not behind and now_s - self._heard_s < self._limits.silence_s:
            return False
        self._asking = True
        return True

    def answered(self, state: HandoverState | None, now_s: float) -> None:
        """What prefill answered, None for nothing."""
        self._asking = False
        self._heard_s = now_s
        if state is None:
            self._unanswered += 1
            self._over |= self._unanswered >= self._limits.asks
            return
        self._unanswered = 0
        if state.plan is not None and state.plan.prefill == self.prefill:
            self._arrival.planned(state.plan)
            self._arrival.announced_again(state.parts)
        self._over |= state.done is not None or state.failed is not None


@dataclass(slots=True)
class _Early:
    """What was said of a request that is not here yet."""

    since_s: float
    said: list[Said] = field(default_factory=list[Said])


class EarlyWords:
    """Hand-over messages that overtook their work. Bounded; old ones are dropped."""

    def __init__(self, limits: DecodeLimits) -> None:
        """Nothing yet."""
        self._limits = limits
        self._early: OrderedDict[RequestRef, _Early] = OrderedDict()

    def __len__(self) -> int:
        """Requests that were heard of."""
        return len(self._early)

    def keep(self, said: Said, now_s: float) -> None:
        """Keep it for when the work comes."""
        ref = RequestRef(said.request, said.attempt)
        early = self._early.setdefault(ref, _Early(now_s))
        if len(early.said) < self._limits.early_messages:
            early.said.append(said)
        while len(self._early) > self._limits.early_requests:
            self._early.popitem(last=False)

    def take(self, ref: RequestRef) -> list[Said]:
        """The work has come."""
        early = self._early.pop(ref, None)
        return early.said if early else []

    def expire(self, now_s: float) -> None:
        """Drop what nobody came for."""
        while self._early:
            ref, early = next(iter(self._early.items()))
            if now_s - early.since_s < self._limits.early_kept_s:
                return
            del self._early[ref]

    def clear(self) -> None:
        """Drop all."""
        self._early.clear()
