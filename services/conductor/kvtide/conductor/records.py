"""What a conductor's commands mean as catalog rows, at a wall-clock time for people."""

from kvtide.bus.messages import Beat, CandidateEstimate, Placed
from kvtide.catalog import (
    CandidateRow,
    DecisionOutcome,
    DecisionRow,
    NodeRow,
    OthersRow,
    RequestRow,
    Verdict,
)
from kvtide.conductor.commands import RecordDecision, RecordEnd
from kvtide.kv import NodeId, Tier
from kvtide.policy import RestSummary


def decision_row(
    command: RecordDecision, conductor: NodeId, wall_s: float
) -> DecisionRow:
    """A decision, with its best candidates."""
    admit, answer = command.admit, command.answer
    placed = answer if isinstance(answer, Placed) else None
    return DecisionRow(
        request=admit.request,
        attempt=admit.attempt,
        conductor=conductor,
        tenant=admit.tenant,
        model=admit.model,
        verdict=Verdict.REJECTED if placed is None else Verdict.PLACED,
        code="" if isinstance(answer, Placed) else answer.code.value,
        reason=answer.reason,
        prefill=placed.prefill.node if placed and placed.prefill else None,
        decode=placed.decode.node if placed else None,
        prompt_tokens=admit.prompt_tokens,
        hit_tokens=placed.chosen.hit_tokens if placed else 0,
        considered=command.considered,
        candidates=tuple(_candidate(each) for each in command.candidates),
        decided_at_s=wall_s,
        dram_tokens=_tier_tokens(placed, Tier.DRAM),
        ssd_tokens=_tier_tokens(placed, Tier.SSD),
        others=command.rest and _others(command.rest),
    )


def end_rows(command: RecordEnd, wall_s: float) -> tuple[RequestRow, DecisionOutcome]:
    """How a request ended, and what came of its last decision."""
    ended = command.ended
    return (
        RequestRow(
            request=ended.request,
            attempt=ended.attempt,
            gateway=ended.gateway.node,
            tenant=ended.tenant,
            model=ended.model,
            outcome=ended.outcome.value,
            code=ended.code,
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            output_tokens=ended.output_tokens,
            ttft_ms=ended.ttft_ms,
            tbt_ms=ended.tbt_ms,
            total_ms=ended.total_ms,
            ended_at_s=wall_s,
        ),
        DecisionOutcome(
            request=ended.request,
            attempt=ended.attempt,
            outcome=ended.outcome.value,
            cached_tokens=ended.cached_tokens,
            ttft_ms=ended.ttft_ms,
            tbt_ms=ended.tbt_ms,
        ),
    )


def node_row(beat: Beat, wall_s: float, *, gone: bool = False) -> NodeRow:
    """A node as it was last seen."""
    return NodeRow(
        node=beat.node.node,
        epoch=beat.node.epoch,
        roles=tuple(role.value for role in beat.roles),
        host=beat.host,
        state=beat.state.value,
        http=beat.http,
        seen_at_s=wall_s,
        gone_at_s=wall_s if gone else None,
    )


def _tier_tokens(placed: Placed | None, tier: Tier) -> int:
    """Of the hit tokens, those in copies of this tier."""
    if placed is None or not placed.reuse:
        return 0
    copies = sum(1 for copy in placed.reuse if copy.slot.tier is tier)
    return placed.chosen.hit_tokens * copies // len(placed.reuse)


def _others(rest: RestSummary) -> OthersRow:
    return OthersRow(
        rest.candidates, rest.least_ttft_ms, rest.median_ttft_ms, rest.most_ttft_ms
    )


def _candidate(estimate: CandidateEstimate) -> CandidateRow:
    return CandidateRow(
        prefill=estimate.prefill,
        decode=estimate.decode,
        hit_tokens=estimate.hit_tokens,
        queue_ms=estimate.queue_ms,
        transfer_ms=estimate.transfer_ms,
        prefill_ms=estimate.prefill_ms,
        ttft_ms=estimate.ttft_ms,
        tbt_ms=estimate.tbt_ms,
    )
