"""One request at an engine that runs whole requests by itself. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvtide.bus.messages import (
    DecodeFailed,
    DecodeTimes,
    DecodeWork,
    HandoverState,
    PictureWork,
    PrefillDone,
    PrefillFailed,
    PrefillTimes,
    PullState,
    TokenPage,
    TokenPull,
    Tokens,
)
from kvtide.decode.answer import Answer, StopRule
from kvtide.decode.events import ModelLoaded
from kvtide.decode.handover import Said
from kvtide.decode.limits import DecodeLimits
from kvtide.engine.serving import Ask, Piece
from kvtide.kv import NodeRef, RequestRef


class Phase(StrEnum):
    """Where a request stands. One that waits does so for another worker's prefill."""

    WAITING = "waiting"
    ASKED = "asked"
    RUNNING = "running"
    ENDED = "ended"


_STATES = {
    Phase.WAITING: PullState.WAITING,
    Phase.ASKED: PullState.WAITING,
    Phase.RUNNING: PullState.RUNNING,
}


@dataclass(slots=True)
class Prefilling:
    """What is known of a prefill by another worker.

    ``over``: nothing more will come; ``done``: the prompt's KV is in the pool.
    """

    prefill: NodeRef | None
    over: bool = False
    done: bool = False
    heard_s: float = 0.0
    asking: bool = False
    unanswered: int = 0

    def hear(self, said: Said, now_s: float) -> None:
        """Prefill says something; another life's word is none."""
        if said.prefill != self.prefill:
            return
        self.heard_s = now_s
        self._ended(
            done=isinstance(said, PrefillDone), failed=isinstance(said, PrefillFailed)
        )

    def gone(self, node: NodeRef) -> None:
        """This life of a node has ended."""
        if self.prefill is not None and self.prefill.ends_with(node):
            self.over = True

    def ask(self, now_s: float, limits: DecodeLimits) -> bool:
        """Whether the state is to be pulled now; ``answered`` ends it."""
        if self.over or self.asking or now_s - self.heard_s < limits.silence_s:
            return False
        self.asking = True
        return True

    def answered(
        self, state: HandoverState | None, now_s: float, limits: DecodeLimits
    ) -> None:
        """What prefill answered, None for nothing."""
        self.asking = False
        self.heard_s = now_s
        if state is None:
            self.unanswered += 1
            self.over |= self.unanswered >= limits.asks
            return
        self.unanswered = 0
        self._ended(done=state.done is not None, failed=state.failed is not None)

    def _ended(self, *, done: bool, failed: bool) -> None:
        self.done |= done
        self.over |= done or failed


@dataclass(slots=True)
class Answering:
    """A request, from its work until its last token is acknowledged."""

    ref: RequestRef
    work: DecodeWork
    answer: Answer
    prefilling: Prefilling
    arrived_s: float
    phase: Phase = Phase.WAITING
    asked_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    cached: int = 0
    prompt_tokens: int = 0
    picture_bytes: int = 0
    max_tokens: int = 0
    failed: DecodeFailed | None = field(default=None)

    @classmethod
    def of(
        cls, work: DecodeWork, model: ModelLoaded, me: NodeRef, now_s: float
    ) -> "Answering":
        """A new request. A prefill on this node is the engine's own affair."""
        rule = StopRule.of(work, model.eos_token_ids, model.max_tokens)
        answer = Answer(len(work.tokens) - work.prompt_tokens, rule)
        apart = work.prefill if work.prefill not in (None, me) else None
        prefilling = Prefilling(apart, over=apart is None, heard_s=now_s)
        ref = RequestRef(work.request, work.attempt)
        return cls(
            ref,
            work,
            answer,
            prefilling,
            now_s,
            prompt_tokens=work.prompt_tokens,
            picture_bytes=sum(map(len, pictures_of(work))),
            max_tokens=model.max_tokens,
        )

    @property
    def deadline_s(self) -> float:
        """When its first token must be there."""
        return self.arrived_s + self.work.deadline_ms / 1000

    @property
    def tokens(self) -> int:
        """Tokens of the sequence so far."""
        return self.prompt_tokens + self.answer.count

    @property
    def most_tokens(self) -> int:
        """Tokens that the sequence may have in the end."""
        return self.tokens + self.answer.left

    def ask(self, now_s: float) -> Ask:
        """What the engine is asked for; it begins now. Its pictures are kept no longer."""
        self.phase = Phase.ASKED
        self.asked_s = now_s
        work, rule, first = self.work, self.answer.rule, self.answer.first
        if isinstance(work, PictureWork):
            self.work = msgspec.structs.replace(work, pictures=())
        return Ask(
            ref=self.ref,
            tokens=work.tokens,
            answered=first,
            tenant=work.tenant,
            salt=work.salt,
            sampling=work.sampling,
            max_tokens=rule.max_new_tokens - first,
            min_tokens=max(0, rule.min_new_tokens - first),
            stop_ids=tuple(sorted(rule.stop_ids)),
            handed=self.prefilling.done,
            model=work.model,
            pictures=pictures_of(work),
        )

    def drew(self, piece: Piece, me: NodeRef, now_s: float) -> Tokens:
        """Take what the engine has drawn; what the gateway is told."""
        first = self.phase is not Phase.RUNNING
        if first:
            self._began(piece)
        self.phase, self.last_s = Phase.RUNNING, now_s
        index = self.answer.count
        told = piece.logprobs or (None,) * len(piece.ids)
        for token, logprobs in zip(piece.ids, told, strict=True):
            if self.answer.finish is None:
                self.answer.add(token, logprobs)
        return self.words(index, me, first=first, now_s=now_s)

    def _began(self, piece: Piece) -> None:
        """The prompt's true length is known: what is left of the context may be less."""
        longer = (piece.prompt_tokens or self.prompt_tokens) - self.prompt_tokens
        if longer > 0:
            self.prompt_tokens += longer
            self.answer.rule = self.answer.rule.within(
                self.max_tokens - self.prompt_tokens
            )
        self.cached = min(piece.cached_tokens, self.prompt_tokens)

    def words(self, index: int, me: NodeRef, *, first: bool, now_s: float) -> Tokens:
        """The event for the tokens from ``index`` on."""
        times = DecodeTimes(
            wait_ms=(self.asked_s - self.arrived_s) * 1000,
            first_step_ms=(now_s - self.asked_s) * 1000,
        )
        return Tokens(
            request=self.ref.request,
            attempt=self.ref.attempt,
            decode=me,
            choice=0,
            index=index,
            ids=self.answer.since(index),
            finish=self.answer.finish,
            reused_tokens=self.cached if first else None,
            prompt_tokens=self._longer() if first else None,
            times=times if first else None,
            logprobs=self.answer.logprobs_since(index),
        )

    def prefilled(self, me: NodeRef, now_s: float) -> PrefillDone:
        """What the prefill role of this very node would say: the engine did both."""
        times = PrefillTimes(
            queue_ms=(self.asked_s - self.arrived_s) * 1000,
            load_ms=0.0,
            compute_ms=(now_s - self.asked_s) * 1000,
        )
        return PrefillDone(
            request=self.ref.request,
            attempt=self.ref.attempt,
            prefill=me,
            reused_tokens=self.cached,
            computed_tokens=len(self.work.tokens) - self.cached,
            messages=0,
            times=times,
        )

    def fail(self, me: NodeRef, code: str, reason: str) -> DecodeFailed:
        """The attempt is given up."""
        self.failed = DecodeFailed(
            request=self.ref.request,
            attempt=self.ref.attempt,
            decode=me,
            code=code,
            reason=reason,
        )
        return self.failed

    def page(self, pull: TokenPull) -> TokenPage:
        """All from an index on, and how the request stands."""
        state = _STATES.get(self.phase, PullState.FINISHED)
        began = self.phase in (Phase.RUNNING, Phase.ENDED)
        page = self.answer.page(
            pull, state, self.failed, self.cached if began else None
        )
        return msgspec.structs.replace(page, prompt_tokens=self._longer())

    def _longer(self) -> int | None:
        """The prompt's length, if it is not what the gateway sent."""
        sent = self.work.prompt_tokens
        return self.prompt_tokens if self.prompt_tokens != sent else None


def pictures_of(work: DecodeWork) -> tuple[bytes, ...]:
    """The pictures of a prompt, in order."""
    return work.pictures if isinstance(work, PictureWork) else ()


def tightest_tbt_ms(requests: Iterable[Answering]) -> float:
    """The tightest target for the time between tokens of these; 0: none has one."""
    targets = [one.work.tbt_ms for one in requests if one.work.tbt_ms]
    return min(targets, default=0.0)
