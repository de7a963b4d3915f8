"""The life of one request, from its submission to its one terminal answer. Pure.

PLACING ──Placed──> RUNNING ──tokens…finish──> ANSWERED (cancels may still repeat)
   ^                   │
   └── a worker refused or was lost (see ``Patience`` for how often and how long)

Whatever is lost, repeated, delayed or reordered: exactly one of ``Finish``, ``Fail`` or
(when the client is gone) nothing is commanded, exactly one ``RecordEnded``, and the
emitted tokens are a gapless prefix of the answer. What an older attempt or another life
of a worker says is ignored.

A prefill worker that fails after it took its work ends nothing: decode computes what is
missing. A refusal, or a lost decode worker, starts a new attempt with that worker left
out and with the tokens received so far behind the prompt; seed and position fix every
draw, so the answer goes on as if nothing had happened. When nobody is there to take it,
a request that ran waits for workers and conductors to come back.
"""

from typing import assert_never

from kvtide.bus.messages import (
    CandidateEstimate,
    FinishReason,
    Outcome,
    Placed,
    Rejected,
    WorkAccepted,
)
from kvtide.gateway.life.answer import Answer
from kvtide.gateway.life.attempt import Attempt, Work, WorkState
from kvtide.gateway.life.cancels import Cancels
from kvtide.gateway.life.commands import (
    Began,
    Command,
    Fail,
    RecordEnded,
    SendAdmit,
    SendDecodeWork,
    SendPrefillWork,
)
from kvtide.gateway.life.events import (
    Aborted,
    AdmitLost,
    CancelAcked,
    ClientGone,
    ConductorEvent,
    Event,
    MemberEvent,
    NodeGone,
    NodeJoined,
    OutsideEvent,
    Stage,
    StreamEvent,
    Submitted,
    Tick,
    WorkAnswered,
    WorkLost,
)
from kvtide.gateway.life.letters import Letters
from kvtide.gateway.life.losses import (
    Exclusions,
    Loss,
    LossKind,
    may_come_back,
    rejection_failure,
)
from kvtide.gateway.life.patience import Patience
from kvtide.gateway.life.spec import (
    FailureKind,
    LifeLimits,
    RequestFailure,
    RequestSpec,
)
from kvtide.gateway.life.text_sink import TextSink
from kvtide.kv import KeySpace, NodeRef, RequestRef

_GROWTHS = 3
"""How often the patience with a conductor doubles: from 250 ms to 2 s by default."""


class Life:
    """The machine. ``handle`` is its only input, the returned commands its only output."""

    def __init__(
        self, spec: RequestSpec, space: KeySpace, text: TextSink, limits: LifeLimits
    ) -> None:
        """Nothing happens before ``Submitted``."""
        self.spec = spec
        self._limits = limits
        self._letters = Letters(spec, space)
        self._answer = Answer(spec, text, limits)
        self._attempt: Attempt | None = None
        self._excluded = Exclusions()
        self._patience = Patience(limits)
        self._cancels = Cancels(spec.request, limits)
        self._deadline_s = float("inf")
        self._answered = False
        self._began = False

    @property
    def answered(self) -> bool:
        """Whether the terminal answer is out (or nobody is left to get one)."""
        return self._answered

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: the shell may forget this life."""
        return self._answered and not self._cancels

    @property
    def attempt(self) -> int:
        """The number of the current attempt; 0 before the first."""
        return self._attempt.number if self._attempt else 0

    @property
    def workers(self) -> dict[Stage, NodeRef]:
        """The workers of the current attempt."""
        works = self._attempt.works if self._attempt else {}
        return {stage: work.worker for stage, work in works.items()}

    @property
    def estimate(self) -> CandidateEstimate | None:
        """What the conductor expects of the current attempt, once it is placed."""
        return self._attempt.estimate if self._attempt else None

    @property
    def queue_ms(self) -> float | None:
        """How long the request waited in prefill's queue, once prefill has said so."""
        return self._answer.book.queue_ms

    @property
    def wake_s(self) -> float:
        """When a ``Tick`` next has an effect; infinite if only events can."""
        if self._answered or self._attempt is None:
            return self._cancels.wake_s
        return min(
            self._cancels.wake_s,
            self._deadline_s,
            self._attempt.wake_s,
            self._answer.wake_s,
        )

    def owned(self) -> list[tuple[Stage, NodeRef, RequestRef]]:
        """Which workers may rightly hold something for which attempt."""
        if self._answered or self._attempt is None:
            return []
        ref = RequestRef(self.spec.request, self._attempt.number)
        return [(*work, ref) for work in self._attempt.open_workers()]

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take one event at ``now_s`` (monotonic, never less than before)."""
        if isinstance(event, OutsideEvent):
            return self._outside(event, now_s)
        if isinstance(event, MemberEvent):
            return self._member(event, now_s)
        if isinstance(event, CancelAcked):
            self._cancels.acked(event.stage, event.worker, event.attempt)
            return []
        if self._answered or self._attempt is None:
            return []
        return self._running(self._attempt, event, now_s)

    def _running(
        self,
        attempt: Attempt,
        event: ConductorEvent | StreamEvent | WorkAnswered | WorkLost,
        now_s: float,
    ) -> list[Command]:
        if isinstance(event, ConductorEvent):
            return self._conductor(attempt, event, now_s)
        if isinstance(event, StreamEvent):
            return self._stream(attempt, event, now_s)
        return self._work(attempt, event, now_s)

    def _outside(self, event: OutsideEvent, now_s: float) -> list[Command]:
        match event:
            case Tick():
                return [*self._cancels.tick(now_s), *self._tick(now_s)]
            case Submitted():
                if self._attempt is not None or self._answered:
                    return []
                self._deadline_s = now_s + self._limits.deadline_s
                self._answer.book.started(now_s)
                return self._next_attempt(now_s)
            case ClientGone():
                return self._end(Outcome.CANCELLED, "client_gone", now_s)
            case Aborted():
                return self._fail(FailureKind.SHUTDOWN, event.reason, now_s)
            case _:
                assert_never(event)

    def _tick(self, now_s: float) -> list[Command]:
        attempt = self._attempt
        if self._answered or attempt is None:
            return []
        if now_s >= self._deadline_s:
            return self._fail(FailureKind.DEADLINE, "the time limit is over", now_s)
        if attempt.is_placed:
            return self._watch(attempt, now_s)
        if now_s < attempt.next_rank_s:
            return []
        return self._next_conductor(attempt, now_s)

    def _watch(self, attempt: Attempt, now_s: float) -> list[Command]:
        """Time has passed for work that is placed."""
        late = attempt.unanswered(now_s)
        if late is not None:
            return self._lost(
                attempt, late, Loss.silent(f"{late} did not answer"), now_s
            )
        decode = attempt.works[Stage.DECODE]
        if self._answer.is_dead(now_s):
            loss = Loss.silent("decode went silent")
            return self._lost(attempt, Stage.DECODE, loss, now_s)
        return self._answer.tick(attempt.number, decode.worker, now_s)

    # ---- membership

    def _member(self, event: MemberEvent, now_s: float) -> list[Command]:
        if isinstance(event, NodeJoined):
            self._excluded.joined(event.node)
            if self._attempt is not None and not self._answered:
                # whoever waits for a worker to come back need not wait to the end
                self._attempt.hasten(now_s + self._patience.afresh_s())
            return []
        self._cancels.gone(event.node)
        if self._answered or self._attempt is None:
            return []
        return self._node_gone(self._attempt, event, now_s)

    def _node_gone(
        self, attempt: Attempt, event: NodeGone, now_s: float
    ) -> list[Command]:
        hit = attempt.hit_by(event.node)
        for stage in hit:
            work = attempt.works[stage]
            needed = stage is Stage.DECODE or work.state is WorkState.SENT
            if needed:
                return self._lost(attempt, stage, Loss.gone("it is gone"), now_s)
            work.state = WorkState.OVER
        return []

    # ---- placing

    def _next_attempt(self, now_s: float) -> list[Command]:
        self._attempt = Attempt(self.attempt + 1, now_s, self._limits.admit_patience_s)
        self._answer.restart()
        return [self._admit(self._attempt)]

    def _admit(self, attempt: Attempt) -> SendAdmit:
        message = self._letters.admit(
            attempt.number, self._answer.tokens, self._excluded.nodes
        )
        return SendAdmit(attempt.rank, message)

    def _next_conductor(self, attempt: Attempt, now_s: float) -> list[Command]:
        late = now_s >= attempt.started_s + self._limits.admit_limit_s
        if late and self._patience.over(now_s):
            return self._fail(FailureKind.NO_CONDUCTOR, "no conductor answers", now_s)
        attempt.rank += 1
        # conductors that are slow get no quicker by being asked again and again
        growth = 2 ** min(attempt.rank, _GROWTHS)
        attempt.next_rank_s = now_s + self._limits.admit_patience_s * growth
        return [self._admit(attempt)]

    def _conductor(
        self, attempt: Attempt, event: ConductorEvent, now_s: float
    ) -> list[Command]:
        if attempt.is_placed:
            return []
        if isinstance(event, AdmitLost):
            return self._admit_lost(attempt, event, now_s)
        if event.reply.attempt != attempt.number:
            return []
        if isinstance(event.reply, Rejected):
            return self._rejected(attempt, event.reply, now_s)
        return self._placed(attempt, event.reply, now_s)

    def _admit_lost(
        self, attempt: Attempt, event: AdmitLost, now_s: float
    ) -> list[Command]:
        if (event.attempt, event.rank) != (attempt.number, attempt.rank):
            return []
        if event.live == 0 and self._patience.over(now_s):
            return self._fail(FailureKind.NO_CONDUCTOR, "no conductor is live", now_s)
        if attempt.rank + 1 >= event.live:
            return []  # all were asked: the timer starts the next round
        return self._next_conductor(attempt, now_s)

    def _rejected(
        self, attempt: Attempt, reply: Rejected, now_s: float
    ) -> list[Command]:
        """Final, but for a request that ran: it asks again, under another number."""
        if not may_come_back(reply) or self._patience.over(now_s):
            return self._fail_with(rejection_failure(reply), now_s)
        self._excluded.forgive()
        again_s = now_s + self._patience.pause_s()
        self._attempt = Attempt(attempt.number + 1, now_s, 0.0)
        self._attempt.start_at(again_s)
        return []

    def _placed(self, attempt: Attempt, placed: Placed, now_s: float) -> list[Command]:
        tokens = self._answer.tokens
        placed = self._letters.checked(placed, tokens)
        attempt.place(placed, now_s + self._limits.work_patience_s)
        self._patience.placed()
        left_ms = (self._deadline_s - now_s) * 1000
        commands: list[Command] = []
        if placed.prefill is not None:
            work = self._letters.prefill(placed, tokens, left_ms)
            commands.append(SendPrefillWork(placed.prefill, work))
        decode = self._letters.decode(placed, tokens, left_ms)
        commands.append(SendDecodeWork(placed.decode, decode))
        return commands

    # ---- work and its loss

    def _work(
        self, attempt: Attempt, event: WorkAnswered | WorkLost, now_s: float
    ) -> list[Command]:
        work = attempt.of(event.stage, event.worker)
        if work is None or work.state is not WorkState.SENT:
            return []
        match event:
            case WorkLost():
                if event.attempt != attempt.number:
                    return []
                loss = Loss.silent(event.reason)
                return self._lost(attempt, event.stage, loss, now_s)
            case WorkAnswered():
                if event.reply.attempt != attempt.number:
                    return []
                if isinstance(event.reply, WorkAccepted):
                    self._taken(event.stage, work, now_s)
                    return self._begin(attempt)
                loss = Loss.refused(event.reply)
                return self._lost(attempt, event.stage, loss, now_s)
            case _:
                assert_never(event)

    def _taken(self, stage: Stage, work: Work, now_s: float) -> None:
        if work.state is WorkState.SENT:
            work.state = WorkState.TAKEN
        if stage is Stage.DECODE:
            self._answer.listen(now_s)

    def _begin(self, attempt: Attempt) -> list[Command]:
        if not attempt.is_taken:
            return []
        self._patience.taken()
        if self._began:
            return []
        self._began = True
        return [Began()]

    def _lost(
        self, attempt: Attempt, stage: Stage, loss: Loss, now_s: float
    ) -> list[Command]:
        """The attempt can't go on: the next one, or the end."""
        work = attempt.works[stage]
        self._excluded.add(work.worker)
        # who says that it failed has had the work, though its yes may come later
        ran = attempt.is_taken or loss.kind is LossKind.FAILED
        answered = len(self._answer.tokens)
        failure = self._patience.lost(loss, ran=ran, answered=answered, now_s=now_s)
        if loss.holds_nothing:
            work.state = WorkState.OVER
        if answered >= self.spec.max_new_tokens:
            return self._finish(FinishReason.LENGTH, now_s)
        if failure is not None:
            return self._fail_with(failure, now_s)
        cancels = self._cancel_all(attempt, "superseded", now_s)
        return [*cancels, *self._next_attempt(now_s)]

    def _cancel_all(self, attempt: Attempt, reason: str, now_s: float) -> list[Command]:
        return [
            self._cancels.start(stage, worker, attempt.number, reason, now_s)
            for stage, worker in attempt.open_workers()
        ]

    # ---- what workers say

    def _stream(
        self, attempt: Attempt, event: StreamEvent, now_s: float
    ) -> list[Command]:
        taken = self._answer.hear(attempt, event, now_s)
        if taken is None:
            return []
        if taken.lost is not None:
            return self._lost(attempt, Stage.DECODE, taken.lost, now_s)
        decode = attempt.works[Stage.DECODE]
        commands: list[Command] = [*self._begin(attempt), *taken.emits]
        if taken.finish is not None:
            if taken.decode_done:
                decode.state = WorkState.OVER
            commands += self._finish(taken.finish, now_s)
            return commands
        return [*commands, *self._answer.tick(attempt.number, decode.worker, now_s)]

    # ---- the end

    def _finish(self, reason: FinishReason, now_s: float) -> list[Command]:
        if self._answered:
            return []
        last = self._answer.finish(reason)
        acks = self._answer.final_ack(self._attempt)
        return [*last, *acks, *self._end(Outcome.FINISHED, reason, now_s)]

    def _fail(self, kind: FailureKind, reason: str, now_s: float) -> list[Command]:
        return self._fail_with(RequestFailure(kind, reason), now_s)

    def _fail_with(self, failure: RequestFailure, now_s: float) -> list[Command]:
        if self._answered:
            return []
        rejected = failure.kind in REJECTIONS and not self._answer.tokens
        outcome = Outcome.REJECTED if rejected else Outcome.FAILED
        fail = Fail(failure, self._answer.usage)
        return [fail, *self._end(outcome, failure.kind, now_s)]

    def _end(self, outcome: Outcome, code: str, now_s: float) -> list[Command]:
        """Nothing is answered after this."""
        if self._answered:
            return []
        self._answered = True
        cancels: list[Command] = []
        if self._attempt is not None:
            cancels = self._cancel_all(self._attempt, code, now_s)
        record = self._answer.record(outcome, code, self.attempt, now_s)
        return [*cancels, RecordEnded(record)]


REJECTIONS = frozenset(
    (
        FailureKind.OVERLOADED,
        FailureKind.NO_WORKERS,
        FailureKind.NO_CONDUCTOR,
        FailureKind.TENANT_LIMIT,
        FailureKind.UNKNOWN_MODEL,
        FailureKind.TOO_LARGE,
        FailureKind.UNSUPPORTED,
    )
)
"""Failures that are refusals: no token was promised."""
