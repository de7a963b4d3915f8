"""From costs to candidates, and from candidates to a decision. Shared by policies."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.kv import NodeId
from kvtide.policy.choices import (
    Candidate,
    Estimate,
    Placement,
    Refusal,
    RefusalCode,
    Targets,
)
from kvtide.policy.cost import CostModel, DecodeCost, Rates, Reuse
from kvtide.policy.views import Ask, DecodeWorker, PrefillWorker

EXPLAINED_CANDIDATES = 8
_LEAST_RETRY_MS = 100.0
_NO_WORKERS_RETRY_MS = 1000.0
_ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ChosenDecode:
    """The least loaded decode worker, and what it costs there."""

    worker: DecodeWorker
    cost: DecodeCost


def least_loaded(
    cost: CostModel, ask: Ask, workers: Sequence[DecodeWorker]
) -> ChosenDecode | Refusal:
    """The decode worker with the shortest wait, then pace, then share of memory used."""
    if not workers:
        return Refusal(
            RefusalCode.NO_WORKERS,
            "no decode worker is ready for this request",
            _NO_WORKERS_RETRY_MS,
        )
    fitting = [
        worker
        for worker in workers
        if not 0 < worker.kv_tokens_capacity < ask.reserved_tokens
    ]
    if not fitting:
        largest = max(worker.kv_tokens_capacity for worker in workers)
        return Refusal(
            RefusalCode.TOO_LARGE,
            f"prompt and answer need {ask.reserved_tokens} tokens of KV; the largest "
            f"decode worker has {largest}: ask for fewer tokens",
            None,
        )
    chosen = [ChosenDecode(worker, cost.decode_cost(ask, worker)) for worker in fitting]
    return min(chosen, key=_decode_order)


def _decode_order(decode: ChosenDecode) -> tuple[float, float, float, int, NodeId]:
    worker = decode.worker
    capacity = worker.kv_tokens_capacity
    return (
        decode.cost.wait_ms,
        decode.cost.tbt_ms,
        worker.kv_tokens / capacity if capacity else 0.0,
        worker.kv_tokens,
        worker.ref.node,
    )


def candidate(
    cost: CostModel,
    worker: PrefillWorker,
    rates: Rates,
    decode: ChosenDecode,
    plan: Reuse,
) -> Candidate:
    """The estimate of ``worker`` with this reuse, then ``decode``."""
    queue_ms = cost.queue_ms(worker, rates)
    made_ms = queue_ms + plan.transfer_ms + plan.compute_ms
    made_ms += cost.handover_ms(worker.host, decode.worker.host)
    # decode waits for room while prefill works
    ttft_ms = max(made_ms, decode.cost.wait_ms) + decode.cost.tbt_ms
    estimate = Estimate(
        prefill=worker.ref.node,
        decode=decode.worker.ref.node,
        hit_tokens=plan.hit_tokens,
        queue_ms=queue_ms,
        transfer_ms=plan.transfer_ms,
        prefill_ms=plan.compute_ms,
        ttft_ms=ttft_ms,
        tbt_ms=decode.cost.tbt_ms,
        wait_ms=decode.cost.wait_ms,
    )
    return Candidate(worker.ref, decode.worker.ref, plan, estimate)


def direct_candidate(decode: ChosenDecode, plan: Reuse) -> Candidate:
    """The estimate of decode alone: it loads, and computes the rest in its first step."""
    node = decode.worker.ref.node
    work_ms = plan.transfer_ms + plan.compute_ms
    estimate = Estimate(
        prefill=node,
        decode=node,
        hit_tokens=plan.hit_tokens,
        queue_ms=0.0,
        transfer_ms=plan.transfer_ms,
        prefill_ms=plan.compute_ms,
        ttft_ms=max(work_ms, decode.cost.wait_ms) + decode.cost.tbt_ms,
        tbt_ms=decode.cost.tbt_ms,
        wait_ms=decode.cost.wait_ms,
    )
    return Candidate(None, decode.worker.ref, plan, estimate)


def settle(
    ask: Ask, found: Sequence[Candidate], targets: Targets
) -> Placement | Refusal:
    """The candidate with the smallest TTFT (the first of equals), if it meets targets."""
    if not found:
        return Refusal(
            RefusalCode.NO_WORKERS,
            "no prefill worker is ready for this request",
            _NO_WORKERS_RETRY_MS,
        )
    order = sorted(found, key=lambda choice: choice.estimate.ttft_ms)
    estimates = tuple(choice.estimate for choice in order[:EXPLAINED_CANDIDATES])
    late = _too_late(ask, order[0].estimate, targets)
    if late is not None:
        reason, retry_after_ms = late
        return Refusal(
            RefusalCode.OVERLOADED, reason, retry_after_ms, estimates, len(found)
        )
    return Placement(order[0], estimates, len(found), _reason(ask, order))


def _too_late(
    ask: Ask, best: Estimate, targets: Targets
) -> tuple[str, float | None] | None:
    """Which target even the best candidate misses, and when to try again."""
    wait_ms = max(best.queue_ms, best.wait_ms)
    if wait_ms > targets.queue_ms:
        reason = (
            f"the shortest queue is {wait_ms:.0f} ms long, the limit is "
            f"{targets.queue_ms:.0f} ms"
        )
        return reason, max(_LEAST_RETRY_MS, wait_ms - targets.queue_ms)
    ttft_ms = ask.ttft_ms if ask.ttft_ms is not None else targets.ttft_ms
    if ttft_ms is not None and best.ttft_ms > ttft_ms:
        over_ms = best.ttft_ms - ttft_ms
        reason = (
            f"the first token would take {best.ttft_ms:.0f} ms, the target is "
            f"{ttft_ms:.0f} ms"
        )
        if over_ms > wait_ms:
            return f"{reason}, which even idle workers would miss", None
        return reason, max(_LEAST_RETRY_MS, over_ms)
    tbt_ms = ask.tbt_ms if ask.tbt_ms is not None else targets.tbt_ms
    if tbt_ms is not None and best.tbt_ms > tbt_ms:
        reason = (
            f"tokens would come every {best.tbt_ms:.0f} ms, the target is "
            f"{tbt_ms:.0f} ms"
        )
        return reason, max(_LEAST_RETRY_MS, best.tbt_ms * _ANSWER_TOKENS)
    return None


def _reason(ask: Ask, order: Sequence[Candidate]) -> str:
    best = order[0]
    cost = best.estimate
    cached = f"{cost.hit_tokens} of {ask.prompt_tokens} prompt tokens from the pool"
    if best.rest_tokens == 0:
        way = f"{cost.decode} needs no prefill"
    elif best.prefill is None:
        way = f"{cost.decode} computes the last {best.rest_tokens} tokens itself"
    else:
        way = f"{cost.prefill} computes {best.rest_tokens} tokens for {cost.decode}"
    text = f"{way}, {cached}, first token in {cost.ttft_ms:.0f} ms"
    if len(order) == 1:
        return f"{text}; the only candidate"
    second = order[1].estimate
    later_ms = second.ttft_ms - cost.ttft_ms
    if later_ms < 1:
        return f"{text}; {second.prefill} would be equal"
    return (
        f"{text}; {second.prefill} would take {later_ms:.0f} ms longer, mostly "
        f"{_difference(cost, second)}"
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
