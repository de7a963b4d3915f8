"""Whether a request is taken: early rejection on predicted load. Pure.

The load of prefill is the predicted time to first token over its target, that of decode
the predicted time between tokens over its target (arXiv version of the paper, §7). A
request is refused at its arrival if the larger of the two is above what its priority
may use, so that no prefill is done for what decode would refuse. With prediction, the
decode worker's load is that of the time at which the prefill will be done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvtide.kv import TenantId
from kvtide.policy.choices import Bottleneck, Estimate
from kvtide.policy.views import Ask

LEAST_RETRY_MS = 100.0


class Prediction(StrEnum):
    """How the load of decode at a later time is predicted.

    ``OFF``: it will be as it is. ``UNIFORM``: every answer takes equally long (the
    paper's model). ``FITTED``: answers end as those did that were seen.
    """

    OFF = "off"
    UNIFORM = "uniform"
    FITTED = "fitted"


@dataclass(frozen=True, slots=True)
class TenantTargets:
    """Targets of one tenant's requests that name none; None: the default."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """What must hold for a request to be taken.

    ``queue_ms`` bounds the predicted wait (prefill's queue and decode's room) of any
    request; ``ttft_ms`` and ``tbt_ms`` apply when neither the request nor its tenant
    names one. Work of a priority below 0 is taken up to ``shed_share`` of what other
    work is, so it goes first. Without ``early``, decode's pace is not looked at here:
    the decode worker itself refuses what comes to it too much.
    """

    queue_ms: float = 120_000.0
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    shed_share: float = 0.8
    early: bool = True
    tenants: Mapping[TenantId, TenantTargets] = field(
        default_factory=dict[TenantId, TenantTargets]
    )

    def of(
        self, tenant: TenantId, ttft_ms: float | None, tbt_ms: float | None
    ) -> tuple[float | None, float | None]:
        """The targets (TTFT, TBT) of a request that itself names these."""
        own = self.tenants.get(tenant, _NO_TARGETS)
        if ttft_ms is None:
            ttft_ms = self.ttft_ms if own.ttft_ms is None else own.ttft_ms
        if tbt_ms is None:
            tbt_ms = self.tbt_ms if own.tbt_ms is None else own.tbt_ms
        return ttft_ms, tbt_ms

    def share(self, priority: int) -> float:
        """How much of the targets work of this priority may use."""
        return self.shed_share if priority < 0 else 1.0


_NO_TARGETS = TenantTargets()


@dataclass(frozen=True, slots=True)
class Overload:
    """Why a request is not taken, what is in its way, and when that will be over."""

    reason: str
    bottleneck: Bottleneck
    retry_after_ms: float | None


def overload(ask: Ask, best: Estimate, targets: Targets) -> Overload | None:
    """Which target even the best candidate misses; None: take it.

    ``ask`` has its tenant's targets already (``Targets.of``); the default ones hold
    where it has none. The time to retry is when the queue will have shrunk by as much
    as is too much; the caller knows better when decode will have room.
    """
    share = targets.share(ask.priority)
    first_ms = best.ttft_ms + ask.crowd_ms
    wait_ms = max(best.queue_ms, best.wait_ms)
    # decode computes the prompt itself where no other worker is to
    at_decode = best.prefill == best.decode or best.wait_ms > best.queue_ms
    where = Bottleneck.DECODE if at_decode else Bottleneck.PREFILL
    of_share = "" if share == 1 else f" ({share:.0%} of it for work that may be shed)"
    limit_ms = targets.queue_ms * share
    if wait_ms > limit_ms:
        reason = (
            f"the shortest queue is {wait_ms:.0f} ms long, the limit is "
            f"{targets.queue_ms:.0f} ms{of_share}"
        )
        return Overload(reason, where, max(LEAST_RETRY_MS, wait_ms - limit_ms))
    ttft_ms = targets.ttft_ms if ask.ttft_ms is None else ask.ttft_ms
    tbt_ms = targets.tbt_ms if ask.tbt_ms is None else ask.tbt_ms
    prefill_load = 0.0 if ttft_ms is None else first_ms / max(ttft_ms, 1e-6)
    decode_load = 0.0
    if tbt_ms is not None and targets.early:
        decode_load = best.tbt_ms / max(tbt_ms, 1e-6)
    if max(prefill_load, decode_load) <= share:
        return None
    if ttft_ms is not None and prefill_load >= decode_load:
        over_ms = first_ms - ttft_ms * share
        crowd = ""
        if ask.crowd_ms >= 1:
            crowd = f" ({ask.crowd_ms:.0f} of them because of all that is open)"
        reason = (
            f"the first token would take {first_ms:.0f} ms{crowd}, the target is "
            f"{ttft_ms:.0f} ms{of_share}"
        )
        if over_ms > wait_ms + ask.crowd_ms:
            even = f"{reason}, which even idle workers would miss"
            return Overload(even, where, None)
        return Overload(reason, where, max(LEAST_RETRY_MS, over_ms))
    reason = (
        f"tokens would come every {best.tbt_ms:.0f} ms, the target is "
        f"{tbt_ms:.0f} ms{of_share}"
    )
    answer_tokens = ask.answer_tokens or _ANSWER_TOKENS
    retry_ms = max(LEAST_RETRY_MS, best.tbt_ms * answer_tokens)
    return Overload(reason, Bottleneck.DECODE, retry_ms)


_ANSWER_TOKENS = 128
