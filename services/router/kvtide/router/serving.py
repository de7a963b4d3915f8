"""Which requests an engine answers for whom. Pure: events in, commands out.

As a decode worker: idempotent by (request, attempt), fenced by owner's life, freed when
the owner's list misses it twice. What is different: nothing is pulled, for the engine
has its own cache, and an engine that is away fails all it has, so that gateways place
them anew.
"""

from collections.abc import Sequence
from typing import assert_never

from msgspec import structs

from kvtide.bus.messages import (
    Ack,
    DecodeFailed,
    DecodeLoad,
    DecodeWork,
    Load,
    RefuseCode,
    WorkAccepted,
    WorkRefused,
)
from kvtide.bus.ownership import Ownership, Standing
from kvtide.kv import ModelFacts, NodeRef, RequestRef
from kvtide.router.answer import Answer
from kvtide.router.events import (
    AckArrived,
    Ask,
    Broken,
    Command,
    Ended,
    Event,
    HangUp,
    PullArrived,
    Said,
    WorkArrived,
)
from kvtide.worker import events as common
from kvtide.worker.custody import (
    TOO_LATE,
    Readiness,
    Refusal,
    ServedModel,
    Work,
    refused,
    released,
    unknown_page,
)

KEPT_S = 60.0
"""How long an answer that nobody acknowledges is kept."""


class Serving:
    """The machine of one engine's agent."""

    def __init__(self, me: NodeRef, facts: ModelFacts, *, most_open: int) -> None:
        """``most_open`` requests at a time; more are refused."""
        self._me = me
        self._facts = facts
        self._most = most_open
        model = ServedModel(facts.name, facts.max_tokens, facts.block_tokens)
        self._readiness = Readiness(model=model)
        self._there = False
        self._owners = Ownership()
        self._answers: dict[RequestRef, Answer] = {}
        self._out: list[Command] = []
        self._now_s = 0.0
        self.current_load = DecodeLoad()
        """What others are told; the owner sets it."""

    @property
    def idle(self) -> bool:
        """Nothing runs."""
        return not len(self._owners)

    @property
    def open(self) -> int:
        """Requests that the engine has."""
        return len(self._owners)

    def load(self) -> Load:
        """See ``Machine``."""
        return self.current_load

    def unfit(self, work: Work) -> Refusal | None:
        """Why this can't be done here now."""
        refusal = self._readiness.unfit(work, self._me)
        if refusal is not None:
            return refusal
        if not self._there:
            return RefuseCode.LOADING, "the engine does not answer"
        if len(work.tokens) >= self._facts.max_tokens:
            most = self._facts.max_tokens
            return RefuseCode.TOO_LARGE, f"fewer than {most} tokens fit"
        return None

    def handle(
        self, event: Event | common.CommonEvent, now_s: float
    ) -> Sequence[Command]:
        """Take one event; the commands are to be carried out in order."""
        self._now_s = now_s
        self._out = []
        if isinstance(event, Event):
            self._heard(event)
        elif isinstance(event, common.OwnerSaid):
            self._owner_said(event)
        elif isinstance(event, common.Turned):
            self._turned(event)
        return self._out

    # ---- what gateways and the engine say

    def _heard(self, event: Event) -> None:
        match event:
            case WorkArrived(work):
                self._out.append(common.Reply(self._work(work)))
            case AckArrived(ack):
                ref = RequestRef(ack.request, ack.attempt)
                answer = self._answers.get(ref)
                if answer is not None and answer.over and ack.finished:
                    del self._answers[ref]
            case PullArrived(pull):
                ref = RequestRef(pull.request, pull.attempt)
                answer = self._answers.get(ref)
                page = unknown_page(pull) if answer is None else answer.page(pull.index)
                self._out.append(common.Reply(page))
            case Said() | Ended() | Broken():
                answer = self._answers.get(event.ref)
                if answer is not None and not answer.over:
                    self._engine_said(answer, event)
            case _:
                assert_never(event)

    def _work(self, work: DecodeWork) -> WorkAccepted | WorkRefused:
        ref = RequestRef(work.request, work.attempt)
        standing = self._owners.judge(ref, work.gateway, self._now_s)
        accepted = WorkAccepted(request=ref.request, attempt=ref.attempt, start_ms=0.0)
        if standing is Standing.HELD:
            return accepted
        refusal = TOO_LATE.get(standing) or self.unfit(work) or self._crowded(work)
        if refusal is not None:
            return refused(ref, refusal)
        older = self._owners.held(ref.request)
        if older is not None:
            self._drop(older)
        self._owners.hold(ref, work.gateway)
        stops = () if work.ignore_eos else work.stop_token_ids
        own = () if work.ignore_eos else self._facts.eos_token_ids
        self._answers[ref] = Answer(
            work, frozenset((*stops, *own)), self._facts.block_tokens
        )
        self._out.append(Ask(self._fitted(work)))
        return accepted

    def _fitted(self, work: DecodeWork) -> DecodeWork:
        """As long an answer as the engine has room for.

        It would refuse more, for good, though the client only named a limit.
        """
        room = self._facts.max_tokens - work.prompt_tokens
        return structs.replace(
            work,
            max_new_tokens=min(work.max_new_tokens, room),
            min_new_tokens=min(work.min_new_tokens, room),
        )

    def _crowded(self, work: DecodeWork) -> Refusal | None:
        if len(self._owners) >= self._most:
            return RefuseCode.BUSY, f"{self._most} requests are open at the engine"
        begun = len(work.tokens) > work.prompt_tokens
        if begun and work.sampling.grammar is not None:
            return (
                RefuseCode.UNSUPPORTED,
                "the engine can't go on with a begun answer that a grammar holds",
            )
        return None

    def _engine_said(self, answer: Answer, event: Said | Ended | Broken) -> None:
        match event:
            case Said(_, delta):
                said = answer.add(delta, self._me)
                if said is not None:
                    self._tell(answer, said)
            case Ended(ref, cached_tokens):
                if answer.finish is None:
                    self._fail(answer, "engine", "the stream ended without its end")
                    return
                answer.cached_tokens = cached_tokens
                answer.ended_s = self._now_s
                self._tell(answer, answer.end(self._me))
                self._owners.drop(ref, self._now_s)
            case Broken(ref, code, reason):
                if answer.finish is None:
                    self._fail(answer, code, reason)
                else:  # only what comes behind the end is missing
                    self._engine_said(answer, Ended(ref, answer.cached_tokens))

    # ---- what ends requests

    def _owner_said(self, event: common.OwnerSaid) -> None:
        for ref in released(self._owners, event, self._now_s):
            self._drop(ref, cancelled=True)
        if isinstance(event, common.CancelArrived):
            self._out.append(common.Reply(Ack()))

    def _turned(self, event: common.Turned) -> None:
        match event:
            case common.StoreAttached(attached):
                self._there = attached
                if not attached:
                    self._fail_all("engine_away", "the engine does not answer")
            case common.Drain() | common.Resume():
                self._readiness = self._readiness.turned(event)
            case common.GiveUp():
                self._fail_all("draining", "the worker is ending")
            case common.Fenced(me):
                for ref in list(self._answers):
                    self._drop(ref)
                self._owners.fenced(self._now_s)
                self._me = me
            case common.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _tick(self) -> None:
        for ref in self._owners.expire(self._now_s):
            self._drop(ref, cancelled=True)
        old = [
            ref
            for ref, answer in self._answers.items()
            if answer.over and self._now_s - answer.ended_s > KEPT_S
        ]
        for ref in old:
            del self._answers[ref]

    def _fail_all(self, code: str, reason: str) -> None:
        for answer in list(self._answers.values()):
            if not answer.over:
                self._out.append(HangUp(answer.ref))
                self._fail(answer, code, reason)

    def _fail(self, answer: Answer, code: str, reason: str) -> None:
        """The gateway is told, and asks for another placement."""
        answer.failed, answer.over, answer.ended_s = reason, True, self._now_s
        self._owners.drop(answer.ref, self._now_s)
        failed = DecodeFailed(
            request=answer.work.request,
            attempt=answer.work.attempt,
            decode=self._me,
            code=code,
            reason=reason,
        )
        self._out.append(common.ToGateway(answer.work.gateway, failed))

    def _drop(self, ref: RequestRef, *, cancelled: bool = False) -> None:
        """Nobody wants the rest."""
        answer = self._answers.pop(ref, None)
        if answer is not None and not answer.over:
            self._out.append(HangUp(ref))
        self._owners.drop(ref, self._now_s, cancelled=cancelled)

    def _tell(self, answer: Answer, message: common.Message) -> None:
        self._out.append(common.ToGateway(answer.work.gateway, message))
