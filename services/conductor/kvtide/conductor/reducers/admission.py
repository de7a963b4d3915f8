"""Admission: a request in, a placement or a rejection out.

The one place where the other reducers meet: members are candidates, the index tells the
prefix, bookings add to the loads, answers make it idempotent, the policy decides.
"""

from dataclasses import dataclass, replace

from kvtide.bus.messages import (
    Admit,
    CandidateEstimate,
    GrantAsked,
    Placed,
    PlacementMade,
    RejectCode,
    Rejected,
)
from kvtide.conductor.commands import (
    Announce,
    Answer,
    Command,
    Consult,
    RecordDecision,
)
from kvtide.conductor.events import Word
from kvtide.conductor.reducers.answers import Answers, Asked
from kvtide.conductor.reducers.bookings import Booking, Bookings
from kvtide.conductor.reducers.calibration import Calibration
from kvtide.conductor.reducers.explanations import Explanations
from kvtide.conductor.reducers.fleet import FleetTable, ModelRows, start_ms
from kvtide.conductor.reducers.homes import Homes
from kvtide.conductor.reducers.limits import Denied, TenantLimits
from kvtide.conductor.reducers.membership import Line, Membership
from kvtide.conductor.reducers.outlook import Outlook
from kvtide.conductor.reducers.pending import PendingBlocks
from kvtide.conductor.reducers.rejections import denied, no_model, stale, too_large
from kvtide.conductor.reducers.sight import Sight
from kvtide.kv import Layout, NodeRef
from kvtide.policy import (
    LEAST_RETRY_MS,
    Ask,
    Bottleneck,
    Candidate,
    ColumnPolicy,
    Estimate,
    Fleet,
    Placement,
    RankRule,
    Refusal,
    RestSummary,
)

_HOLD_MARGIN_MS = 2000.0
_S_TO_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The reducers that admission reads, and writes bookings and answers to."""

    membership: Membership
    sight: Sight
    fleet: FleetTable
    bookings: Bookings
    answers: Answers
    explanations: Explanations
    outlook: Outlook
    limits: TenantLimits
    homes: Homes
    pending: PendingBlocks
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to an ``Admit`` and what must be done beside answering."""

    answer: Answer
    commands: tuple[Command, ...] = ()


class Admission:
    """Answers each ``Admit`` at once, and the same one the same way."""

    def __init__(self, known: Knowledge, policy: ColumnPolicy) -> None:
        """``known`` is shared with the dispatcher."""
        self._known = known
        self._policy = policy
        self._turn = 0
        self._layout: tuple[Line, int] | None = None

    def decide(
        self, admit: Admit, me: NodeRef, now_s: float, word: Word | None = None
    ) -> Decision | Consult:
        """Place the request, or say why not. Idempotent by (request, attempt).

        A ``Consult`` comes first where another conductor keeps the tenant's limits;
        ``word`` is what was said to it.
        """
        if (old := self._stale(admit)) is not None:
            return Decision(old)
        known = self._known
        given = known.answers.get(admit.request)
        if given is not None and self._still_good(given.answer, admit):
            return Decision(given.answer)
        line = known.membership.line(admit.model, admit.digest)
        if line is None:
            return self._rejected(admit, no_model(admit, known.membership), now_s)
        if admit.prompt_tokens >= line.facts.max_tokens:
            return self._rejected(admit, too_large(admit, line.facts), now_s)
        ask = self._ask(admit, line, now_s)
        wanted = GrantAsked(
            request=admit.request, tenant=admit.tenant, tokens=ask.reserved_tokens
        )
        over = known.homes.place(me, wanted, word, now_s)
        if isinstance(over, Denied):
            return self._rejected(admit, denied(admit, over), now_s)
        return over or self._decide(admit, ask, line, me, now_s)

    def _decide(
        self, admit: Admit, ask: Ask, line: Line, me: NodeRef, now_s: float
    ) -> Decision:
        """Of a request that could be served and is granted: whether and where."""
        known = self._known
        rows = known.fleet.rows(admit.model, line, admit.excluded)
        verdict = self._verdict(admit, ask, rows, now_s)
        if isinstance(verdict, Refusal):
            known.limits.release(admit.request, now_s)
            calm = self._calm(ask, verdict, rows, now_s)
            return self._refused(admit, calm, now_s)
        return self._placed(admit, ask, verdict, me, now_s)

    def _stale(self, admit: Admit) -> Rejected | None:
        known = self._known
        if known.bookings.has_ended(admit.request):
            return stale(admit, "the request has had its terminal answer")
        booking = known.bookings.get(admit.request)
        given = known.answers.get(admit.request)
        newest = max(
            booking.attempt if booking is not None else admit.attempt,
            given.answer.attempt if given is not None else admit.attempt,
        )
        if newest > admit.attempt:
            return stale(admit, f"attempt {newest} of it is known")
        # placing it anew would take the running request out of the book
        if booking is not None and booking.gateway != admit.gateway:
            return stale(admit, f"{booking.gateway.node} has a request of this name")
        repeated = given is not None and given.answer.attempt == admit.attempt
        if given is not None and repeated and given.asked != Asked.of(admit):
            return stale(admit, "another request of this name was answered")
        return None

    def _still_good(self, answer: Answer, admit: Admit) -> bool:
        """Whether a repeat gets this answer again: not if a chosen worker has gone."""
        if answer.attempt != admit.attempt:
            return False
        if isinstance(answer, Rejected):
            return True
        refs = [answer.decode]
        if answer.prefill is not None:
            refs.append(answer.prefill)
        members = self._known.membership
        return all(
            members.is_live(ref) and ref.node not in admit.excluded for ref in refs
        )

    def _ask(self, admit: Admit, line: Line, now_s: float) -> Ask:
        facts = line.facts
        self._turn += 1
        bookings = self._known.bookings
        # its own earlier placement is no other request
        others = len(bookings) - (bookings.get(admit.request) is not None)
        answer_room = max(0, facts.max_tokens - admit.prompt_tokens)
        max_new_tokens = max(0, min(admit.max_new_tokens, answer_room))
        ttft_ms, tbt_ms = self._policy.targets.of(
            admit.tenant, admit.ttft_ms, admit.tbt_ms
        )
        return Ask(
            prompt_tokens=max(0, admit.prompt_tokens),
            max_new_tokens=max_new_tokens,
            block_tokens=facts.block_tokens,
            block_bytes=self._block_bytes(line),
            ttft_ms=ttft_ms,
            tbt_ms=tbt_ms,
            priority=admit.priority,
            turn=self._turn,
            answer_tokens=self._known.outlook.answer_tokens(max_new_tokens),
            lateness=self._known.calibration.of(admit.model),
            crowd_ms=self._known.calibration.crowd_ms(admit.model, others, now_s),
            one_node=facts.self_contained,
        )

    def _block_bytes(self, line: Line) -> int:
        """A full block as stored, of the model asked for last without a new look."""
        if self._layout is None or self._layout[0] is not line:
            self._layout = line, Layout.of(line.facts).slot_bytes
        return self._layout[1]

    def _verdict(
        self, admit: Admit, ask: Ask, rows: ModelRows, now_s: float
    ) -> Placement | Refusal:
        """The policy's choice; another conductor's for this attempt comes first.

        A gateway that had no answer from another conductor in time asks us with the
        same attempt: choosing the same workers leaves one placement, not two.
        """
        known = self._known
        booking = known.bookings.release(admit.request)
        known.outlook.released(admit.request, now_s)
        known.pending.remove(admit.request)
        if booking is not None and booking.attempt == admit.attempt:
            only = known.fleet.only(rows, booking.prefill, booking.decode)
            verdict = self._place(admit, ask, only, now_s)
            if isinstance(verdict, Placement):
                return verdict
        return self._place(admit, ask, rows, now_s)

    def _place(
        self, admit: Admit, ask: Ask, rows: ModelRows, now_s: float
    ) -> Placement | Refusal:
        known, policy = self._known, self._policy
        holdings = known.sight.holdings(admit.keys)
        held_tokens = holdings.blocks * ask.block_tokens
        pending = known.pending.after(admit.keys, holdings.blocks, now_s)
        inflows = known.outlook.inflows(rows, now_s)
        prefills = known.fleet.prefills(rows, inflows, pending)
        life_tokens = 0.0
        if policy.rules.rank is RankRule.COMPLETION:
            life_tokens = ask.answer_tokens
        begin_ms = start_ms(prefills, ask.kv_tokens - held_tokens)
        coming = known.outlook.coming(rows, now_s, begin_ms, life_tokens)
        decodes = known.fleet.decodes(rows, coming)
        fleet = Fleet(prefills, decodes, known.outlook.outflows(now_s))
        return policy.place(ask, holdings, fleet)

    def _calm(
        self, ask: Ask, refusal: Refusal, rows: ModelRows, now_s: float
    ) -> Refusal:
        """With the time to retry from the forecast, where decode is what is full."""
        best = refusal.candidates[0] if refusal.candidates else None
        target_ms = ask.tbt_ms
        decode = refusal.bottleneck is Bottleneck.DECODE
        if best is None or not decode or not target_ms or best.tbt_ms <= target_ms:
            return refusal
        share = target_ms / best.tbt_ms
        calm_ms = self._known.outlook.calm_ms(rows, now_s, share)
        if calm_ms is None:
            return refusal
        return replace(refusal, retry_after_ms=max(LEAST_RETRY_MS, calm_ms))

    def _rejected(
        self,
        admit: Admit,
        answer: Rejected,
        now_s: float,
        candidates: tuple[CandidateEstimate, ...] = (),
        considered: int = 0,
        rest: RestSummary | None = None,
    ) -> Decision:
        known = self._known
        known.answers.keep(admit, answer, now_s)
        known.explanations.keep(answer, candidates, considered, rest)
        record = RecordDecision(admit, answer, candidates, considered, rest)
        return Decision(answer, (record,))

    def _refused(self, admit: Admit, refusal: Refusal, now_s: float) -> Decision:
        reason = refusal.reason
        if admit.excluded:
            reason += f" ({len(admit.excluded)} excluded by earlier attempts)"
        answer = Rejected(
            request=admit.request,
            attempt=admit.attempt,
            code=RejectCode(refusal.code.value),
            reason=reason,
            retry_after_ms=refusal.retry_after_ms,
        )
        candidates = tuple(shown(estimate) for estimate in refusal.candidates)
        return self._rejected(
            admit, answer, now_s, candidates, refusal.considered, refusal.rest
        )

    def _placed(
        self, admit: Admit, ask: Ask, verdict: Placement, me: NodeRef, now_s: float
    ) -> Decision:
        chosen = verdict.chosen
        answer = Placed(
            request=admit.request,
            attempt=admit.attempt,
            prefill=chosen.prefill,
            decode=chosen.decode,
            reuse=chosen.reuse,
            chosen=shown(chosen.estimate),
            reason=verdict.reason,
        )
        made = PlacementMade(
            conductor=me,
            request=admit.request,
            attempt=admit.attempt,
            gateway=admit.gateway,
            model=admit.model,
            prefill=chosen.prefill.node if chosen.prefill is not None else None,
            decode=chosen.decode.node,
            new_tokens=chosen.rest_tokens,
            prompt_tokens=admit.prompt_tokens,
            max_new_tokens=ask.max_new_tokens,
            prefill_ms=chosen.estimate.prefill_ms,
            keys=admit.keys[: len(chosen.reuse)],
            hold_ms=chosen.estimate.ttft_ms + _HOLD_MARGIN_MS,
            tenant=admit.tenant,
            transfer_ms=chosen.estimate.transfer_ms,
            ttft_ms=chosen.estimate.ttft_ms,
            tbt_ms=chosen.estimate.tbt_ms,
            sources=tuple(sorted({copy.slot.node for copy in chosen.reuse})),
        )
        known = self._known
        others = len(known.bookings)
        known.bookings.book(booking_of(made, now_s))
        known.outlook.placed(made, now_s)
        known.calibration.placed(made, chosen.estimate, ask.lateness, others)
        self._pending(admit, ask, chosen, now_s)
        known.answers.keep(admit, answer, now_s)
        candidates = tuple(shown(estimate) for estimate in verdict.candidates)
        known.explanations.keep(answer, candidates, verdict.considered, verdict.rest)
        record = RecordDecision(
            admit, answer, candidates, verdict.considered, verdict.rest
        )
        return Decision(answer, (Announce(made), record))

    def _pending(self, admit: Admit, ask: Ask, chosen: Candidate, now_s: float) -> None:
        """The full blocks that the prefill worker will put into the pool."""
        if chosen.prefill is None:
            return
        cost = chosen.estimate
        done_ms = cost.queue_ms + cost.transfer_ms + cost.prefill_ms
        keys = admit.keys[len(chosen.reuse) : ask.full_blocks]
        done_s = now_s + done_ms / _S_TO_MS
        node = chosen.prefill.node
        self._known.pending.add(admit.request, node, keys, now_s, done_s)


def booking_of(made: PlacementMade, now_s: float) -> Booking:
    """The booking that a placement means, heard or made at ``now_s``."""
    return Booking(
        request=made.request,
        attempt=made.attempt,
        conductor=made.conductor,
        gateway=made.gateway,
        prefill=made.prefill,
        decode=made.decode,
        prefill_ms=max(0.0, made.prefill_ms),
        reserved_tokens=max(0, made.prompt_tokens) + max(0, made.max_new_tokens),
        at_s=now_s,
        fill_tokens=max(0, made.new_tokens) if made.prefill is None else 0,
    )


def shown(estimate: Estimate) -> CandidateEstimate:
    """An estimate as messages carry it."""
    return CandidateEstimate(
        prefill=estimate.prefill,
        decode=estimate.decode,
        hit_tokens=estimate.hit_tokens,
        queue_ms=estimate.queue_ms,
        transfer_ms=estimate.transfer_ms,
        prefill_ms=estimate.prefill_ms,
        ttft_ms=estimate.ttft_ms,
        tbt_ms=estimate.tbt_ms,
    )
