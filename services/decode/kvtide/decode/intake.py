"""Whether new work is taken, and what is computed next. Pure."""

from collections.abc import Sequence as Many

from kvtide.bus.messages import DecodeWork, RefuseCode
from kvtide.decode.events import Row
from kvtide.decode.limits import DecodeLimits
from kvtide.decode.pages import PageLedger
from kvtide.decode.sequence import Phase, Sequence
from kvtide.kv import NodeRef
from kvtide.worker.custody import Readiness, Refusal
from kvtide.worker.steps import StepCost, StepShape


def unfit(work: DecodeWork, ready: Readiness, me: NodeRef) -> Refusal | None:
    """Why this work can't be done here at all."""
    refusal = ready.unfit(work, me)
    if refusal is None and ready.model is not None:
        longest = ready.model.max_tokens
        if not 0 < work.prompt_tokens <= len(work.tokens) < longest:
            return RefuseCode.TOO_LARGE, f"fewer than {longest} tokens fit"
    return refusal


def crowded(
    sequence: Sequence,
    others: Many[Sequence],
    pages: PageLedger,
    limits: DecodeLimits,
    cost: StepCost,
) -> Refusal | None:
    """Why this sequence can't be taken, or not soon enough."""
    if sequence.pages > pages.capacity:
        tokens = pages.capacity * sequence.block_tokens
        return RefuseCode.TOO_LARGE, f"the worker's memory holds {tokens} tokens"
    if sum(other.phase is Phase.WAITING for other in others) >= limits.waiting:
        return RefuseCode.BUSY, "the queue is full"
    start_ms = predicted_start_ms(sequence, others, pages, limits, cost)
    if start_ms > sequence.work.deadline_ms:
        return RefuseCode.BUSY, "the deadline can't be met"
    target_ms = tightest_tbt_ms(others)
    if (
        target_ms
        and cost.steps
        and step_ms([*others, sequence], limits, cost) > target_ms
    ):
        return RefuseCode.BUSY, "it would break the target of those that run"
    return None


def tightest_tbt_ms(sequences: Many[Sequence]) -> float:
    """The tightest target for the time between tokens of these; 0: none has one."""
    targets = [
        one.work.tbt_ms
        for one in sequences
        if one.work.tbt_ms and one.phase is not Phase.ENDED
    ]
    return min(targets, default=0.0)


def step_ms(sequences: Many[Sequence], limits: DecodeLimits, cost: StepCost) -> float:
    """A step in which all of these have a row, as many as there are seats."""
    lengths = [len(one.tokens) for one in sequences if one.phase is not Phase.ENDED]
    rows = [(length - 1, length) for length in lengths[-limits.batch :]]
    return cost.ms(StepShape.of(rows))


def predicted_start_ms(
    sequence: Sequence,
    others: Many[Sequence],
    pages: PageLedger,
    limits: DecodeLimits,
    cost: StepCost,
) -> float:
    """When ``sequence`` will get its pages: those that end first make room."""
    waiting = [other for other in others if other.phase is Phase.WAITING]
    wanted = sum(other.first_pages(limits) for other in [sequence, *waiting])
    lacking = wanted - pages.free
    seats = 1 + len(waiting) - (limits.batch - pages.holders)
    holding = [other for other in others if other.opened]
    bound = sorted((other.answer.left, pages.of(other.ref)) for other in holding)
    pace_ms = step_ms(holding, limits, cost)
    start_ms = 0.0
    for left, freed in bound:
        if lacking <= 0 and seats <= 0:
            break
        lacking -= freed
        seats -= 1
        start_ms = left * pace_ms
    return start_ms


def next_rows(sequences: Many[Sequence], limits: DecodeLimits) -> tuple[Row, ...]:
    """The next step: a token for each that runs, and of missing prefixes what fits."""
    rows = [
        sequence.next_row()
        for sequence in sequences
        if sequence.phase is Phase.RUNNING
        and not sequence.starved
        and sequence.answer.unacked < limits.unacked_tokens
    ]
    rows += [one.closing_row() for one in sequences if one.phase is Phase.CLOSING]
    limit = limits.fill_tokens if rows else limits.fill_alone_tokens
    return (*rows, *_fill_rows(sequences, limit))


def _fill_rows(sequences: Many[Sequence], limit: int) -> list[Row]:
    """Pieces of missing prefixes, of about ``limit`` tokens together.

    First come, first served; a short one leaves the rest of its share to the next.
    """
    rows: list[Row] = []
    for one in sequences:
        if one.phase is not Phase.FILLING:
            continue
        row = one.fill_row(limit)
        if rows and len(row.tokens) > limit:
            break
        rows.append(row)
        limit -= len(row.tokens)
        if limit <= 0:
            break
    return rows


def fill_tokens(sequences: Many[Sequence]) -> int:
    """What of their prompts is neither here nor with anyone else."""
    coming = {Phase.WAITING, Phase.PULLING, Phase.FILLING}
    return sum(one.fill_tokens for one in sequences if one.phase in coming)
