"""Admission: a request in, a placement or a rejection out.

The one place where the other reducers meet: members are candidates, the index tells the
prefix, bookings add to the loads, answers make it idempotent, the policy decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.bus.messages import (
    Admit,
    Beat,
    CandidateEstimate,
    Placed,
    PlacementMade,
    RejectCode,
    Rejected,
)
from kvtide.conductor.commands import Announce, Answer, Command, RecordDecision
from kvtide.conductor.reducers.answers import Answers, Asked
from kvtide.conductor.reducers.bookings import Booking, Bookings
from kvtide.conductor.reducers.explanations import Explanations
from kvtide.conductor.reducers.loads import decode_worker, prefill_worker
from kvtide.conductor.reducers.membership import Membership, ModelWorkers
from kvtide.conductor.reducers.prefix_index import PrefixIndex
from kvtide.conductor.reducers.rejections import no_model, stale, too_large
from kvtide.kv import Layout, NodeRef
from kvtide.policy import (
    Ask,
    Cluster,
    Copy,
    Estimate,
    Placement,
    PlacementPolicy,
    Refusal,
)

_HOLD_MARGIN_MS = 2000.0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The reducers that admission reads, and writes bookings and answers to."""

    membership: Membership
    index: PrefixIndex
    bookings: Bookings
    answers: Answers
    explanations: Explanations


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to an ``Admit`` and what must be done beside answering."""

    answer: Answer
    commands: tuple[Command, ...] = ()


class Admission:
    """Answers each ``Admit`` at once, and the same one the same way."""

    def __init__(self, known: Knowledge, policy: PlacementPolicy) -> None:
        """``known`` is shared with the dispatcher."""
        self._known = known
        self._policy = policy

    def decide(self, admit: Admit, me: NodeRef, now_s: float) -> Decision:
        """Place the request, or say why not. Idempotent by (request, attempt)."""
        if (old := self._stale(admit)) is not None:
            return Decision(old)
        known = self._known
        given = known.answers.get(admit.request)
        if given is not None and self._still_good(given.answer, admit):
            return Decision(given.answer)
        workers = known.membership.workers(admit.model, admit.excluded)
        if workers is None:
            return self._rejected(admit, no_model(admit, known.membership), now_s)
        if admit.prompt_tokens >= workers.facts.max_tokens:
            return self._rejected(admit, too_large(admit, workers.facts), now_s)
        ask = self._ask(admit, workers)
        verdict = self._verdict(admit, ask, workers)
        if isinstance(verdict, Refusal):
            return self._refused(admit, verdict, now_s)
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

    def _ask(self, admit: Admit, workers: ModelWorkers) -> Ask:
        facts = workers.facts
        answer_room = max(0, facts.max_tokens - admit.prompt_tokens)
        return Ask(
            prompt_tokens=max(0, admit.prompt_tokens),
            max_new_tokens=max(0, min(admit.max_new_tokens, answer_room)),
            block_tokens=facts.block_tokens,
            block_bytes=Layout.of(facts).slot_bytes,
            prefix=self._prefix(admit),
            ttft_ms=admit.ttft_ms,
            tbt_ms=admit.tbt_ms,
        )

    def _prefix(self, admit: Admit) -> tuple[tuple[Copy, ...], ...]:
        """Copies at stores that are live; the first block without one ends it."""
        prefix: list[tuple[Copy, ...]] = []
        for located in self._known.index.prefix(admit.keys):
            copies: list[Copy] = []
            for copy in located:
                store = self._known.membership.get(copy.slot.node)
                if store is not None and store.node.epoch == copy.slot.epoch:
                    copies.append(Copy(copy, store.host))
            if not copies:
                break
            prefix.append(tuple(copies))
        return tuple(prefix)

    def _verdict(
        self, admit: Admit, ask: Ask, workers: ModelWorkers
    ) -> Placement | Refusal:
        """The policy's choice; another conductor's for this attempt comes first.

        A gateway that had no answer from another conductor in time asks us with the
        same attempt: choosing the same workers leaves one placement, not two.
        """
        booking = self._known.bookings.release(admit.request)
        if booking is not None and booking.attempt == admit.attempt:
            verdict = self._policy.place(ask, self._cluster(workers, only=booking))
            if isinstance(verdict, Placement):
                return verdict
        return self._policy.place(ask, self._cluster(workers))

    def _cluster(
        self, workers: ModelWorkers, *, only: Booking | None = None
    ) -> Cluster:
        prefills: Sequence[Beat] = workers.prefills
        decodes: Sequence[Beat] = workers.decodes
        if only is not None:
            prefills = [beat for beat in prefills if beat.node.node == only.prefill]
            decodes = [beat for beat in decodes if beat.node.node == only.decode]
        booked = self._known.bookings
        return Cluster(
            tuple(prefill_worker(beat, booked) for beat in prefills),
            tuple(decode_worker(beat, booked) for beat in decodes),
        )

    def _rejected(
        self,
        admit: Admit,
        answer: Rejected,
        now_s: float,
        candidates: tuple[CandidateEstimate, ...] = (),
        considered: int = 0,
    ) -> Decision:
        known = self._known
        known.answers.keep(admit, answer, now_s)
        known.explanations.keep(answer, candidates)
        record = RecordDecision(admit, answer, candidates, considered)
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
        return self._rejected(admit, answer, now_s, candidates, refusal.considered)

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
        )
        known = self._known
        known.bookings.book(booking_of(made, now_s))
        known.answers.keep(admit, answer, now_s)
        candidates = tuple(shown(estimate) for estimate in verdict.candidates)
        known.explanations.keep(answer, candidates)
        record = RecordDecision(admit, answer, candidates, verdict.considered)
        return Decision(answer, (Announce(made), record))


def booking_of(made: PlacementMade, now_s: float) -> Booking:
    """The booking that a placement means, heard or made at ``now_s``."""
    return Booking(
        request=made.request,
        attempt=made.attempt,
        conductor=made.conductor,
        gateway=made.gateway,
        prefill=made.prefill,
        decode=made.decode,
        new_tokens=max(0, made.new_tokens),
        reserved_tokens=max(0, made.prompt_tokens) + max(0, made.max_new_tokens),
        at_s=now_s,
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
