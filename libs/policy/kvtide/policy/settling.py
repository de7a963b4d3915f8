"""From ranked candidates to a decision with its reasons. Shared by both ways of scoring."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.policy.admission import Targets, overload
from kvtide.policy.choices import (
    Candidate,
    Estimate,
    Placement,
    Refusal,
    RefusalCode,
    RestSummary,
)
from kvtide.policy.rules import PolicyRules, RankRule
from kvtide.policy.views import Ask

_NO_WORKERS_RETRY_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best candidates' estimates, best first, of all ``considered``; the rest summed."""

    estimates: tuple[Estimate, ...]
    considered: int
    rest: RestSummary | None


def no_decode() -> Refusal:
    """There is no decode worker at all."""
    return Refusal(
        RefusalCode.NO_WORKERS,
        "no decode worker is ready for this request",
        _NO_WORKERS_RETRY_MS,
    )


def no_prefill() -> Refusal:
    """There is no prefill worker, and decode can't do without."""
    return Refusal(
        RefusalCode.NO_WORKERS,
        "no prefill worker is ready for this request",
        _NO_WORKERS_RETRY_MS,
    )


def no_room(ask: Ask, largest: int) -> Refusal:
    """No decode worker will ever have the memory."""
    return Refusal(
        RefusalCode.TOO_LARGE,
        f"prompt and answer need {ask.reserved_tokens} tokens of KV; the largest "
        f"decode worker has {largest}: ask for fewer tokens",
        None,
    )


def too_much(ask: Ask, ranking: Ranking, targets: Targets) -> Refusal | None:
    """The refusal if even the best candidate misses a target."""
    late = overload(ask, ranking.estimates[0], targets)
    if late is None:
        return None
    return Refusal(
        RefusalCode.OVERLOADED,
        late.reason,
        late.retry_after_ms,
        ranking.estimates,
        ranking.considered,
        ranking.rest,
        late.bottleneck,
    )


def placement(
    ask: Ask, rules: PolicyRules, chosen: Candidate, ranking: Ranking
) -> Placement:
    """The decision for the best candidate."""
    return Placement(
        chosen,
        ranking.estimates,
        ranking.considered,
        _reason(ask, rules, chosen, ranking),
        ranking.rest,
    )


def summary(ttfts: Sequence[float]) -> RestSummary | None:
    """Of what isn't shown one by one; None if all is."""
    if not ttfts:
        return None
    order = sorted(ttfts)
    return RestSummary(len(order), order[0], order[len(order) // 2], order[-1])


def _reason(ask: Ask, rules: PolicyRules, chosen: Candidate, ranking: Ranking) -> str:
    cost = chosen.estimate
    cached = f"{cost.hit_tokens} of {ask.prompt_tokens} prompt tokens from the pool"
    pending_tokens = cost.hit_tokens - len(chosen.reuse) * ask.block_tokens
    if pending_tokens > 0:
        cached += f" ({pending_tokens} once another request has computed them there)"
    if chosen.rest_tokens == 0:
        way = f"{cost.decode} needs no prefill"
    elif chosen.prefill is None:
        way = f"{cost.decode} computes the last {chosen.rest_tokens} tokens itself"
    else:
        way = f"{cost.prefill} computes {chosen.rest_tokens} tokens for {cost.decode}"
    text = f"{way}, {cached}, first token in {cost.ttft_ms:.0f} ms"
    return f"{text}; {_against(rules, cost, ranking)}"


def _against(rules: PolicyRules, best: Estimate, ranking: Ranking) -> str:
    if ranking.considered == 1:
        return "the only candidate"
    match rules.rank:
        case RankRule.SHUFFLED:
            return f"chosen at random among {ranking.considered}"
        case RankRule.IN_TURN:
            return f"it was its turn among {ranking.considered}"
        case RankRule.QUEUE:
            return f"it has the shortest queue of {ranking.considered}"
        case RankRule.FIRST_TOKEN | RankRule.COMPLETION:
            return _second(best, ranking)


def _second(best: Estimate, ranking: Ranking) -> str:
    second, rest = ranking.estimates[1], ranking.rest
    others = ""
    if rest is not None:
        others = (
            f"; of {rest.candidates} more the median would take "
            f"{rest.median_ttft_ms:.0f} ms"
        )
    later_ms = second.ttft_ms - best.ttft_ms
    if abs(later_ms) < 1:
        slower_ms = second.tbt_ms - best.tbt_ms
        if slower_ms >= 1:
            return (
                f"with {second.decode} each later token would take {slower_ms:.0f} ms "
                f"longer{others}"
            )
        return f"{second.prefill} would be equal{others}"
    if later_ms < 0:
        return (
            f"{second.prefill} would begin {-later_ms:.0f} ms earlier, but be done "
            f"later{others}"
        )
    return (
        f"{second.prefill} would take {later_ms:.0f} ms longer, mostly "
        f"{_difference(best, second)}{others}"
    )


def _difference(best: Estimate, second: Estimate) -> str:
    parts = {
        "its queue": second.queue_ms - best.queue_ms,
        "loading": second.transfer_ms - best.transfer_ms,
        "computing": second.prefill_ms - best.prefill_ms,
    }
    later_ms = second.ttft_ms - best.ttft_ms
    parts["the hand-over"] = later_ms - sum(parts.values())
    return max(parts, key=lambda name: parts[name])
