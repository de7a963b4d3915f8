"""What an engine has answered to one request, kept until the gateway has it. Pure."""

from dataclasses import dataclass, field

from kvtide.bus.messages import (
    DecodeWork,
    FinishReason,
    PullState,
    TokenLogprobs,
    TokenPage,
    Tokens,
)
from kvtide.kv import NodeRef, RequestRef


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that an engine has just drawn; ``logprobs`` as many, or none."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None


@dataclass(slots=True)
class Answer:
    """One attempt. Indexes are of the whole answer, earlier attempts included.

    A stop token is none of the answer; engines say it with the others, as the last one.
    """

    work: DecodeWork
    stop_ids: frozenset[int]
    block_tokens: int
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish: FinishReason | None = None
    failed: str = ""
    over: bool = False
    acked: bool = False
    cached_tokens: int | None = None
    ended_s: float = 0.0

    @property
    def ref(self) -> RequestRef:
        """Which request and attempt."""
        return RequestRef(self.work.request, self.work.attempt)

    @property
    def first(self) -> int:
        """The index of this attempt's first token."""
        return len(self.work.tokens) - self.work.prompt_tokens

    @property
    def placed_tokens(self) -> int:
        """What the conductor thought that the engine has."""
        return len(self.work.reuse) * self.block_tokens

    def add(self, delta: Delta, me: NodeRef) -> Tokens | None:
        """Take what the engine said; what to tell the gateway, if anything."""
        ids, logprobs = delta.ids, delta.logprobs
        if delta.finish is FinishReason.STOP and ids and ids[-1] in self.stop_ids:
            ids, logprobs = ids[:-1], logprobs[: len(ids) - 1]
        self.finish = delta.finish or self.finish
        if not ids:
            return None
        begins = not self.ids
        index = self.first + len(self.ids)
        self.ids += ids
        self.logprobs += logprobs
        return self._said(
            me, index, ids, logprobs, self.placed_tokens if begins else None
        )

    def end(self, me: NodeRef) -> Tokens:
        """The engine will say no more; ``finish`` is known."""
        self.over = True
        index = self.first + len(self.ids)
        return self._said(me, index, (), (), self.cached_tokens, self.finish)

    def page(self, index: int) -> TokenPage:
        """All from ``index`` on."""
        start = max(0, index - self.first)
        state = PullState.RUNNING if self.ids else PullState.WAITING
        if self.failed:
            state = PullState.FAILED
        elif self.over:
            state = PullState.FINISHED
        return TokenPage(
            request=self.work.request,
            attempt=self.work.attempt,
            choice=0,
            index=max(index, self.first),
            ids=tuple(self.ids[start:]),
            state=state,
            finish=self.finish if self.over else None,
            reason=self.failed,
            logprobs=tuple(self.logprobs[start:]),
        )

    def _said(
        self,
        me: NodeRef,
        index: int,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        reused_tokens: int | None,
        finish: FinishReason | None = None,
    ) -> Tokens:
        return Tokens(
            request=self.work.request,
            attempt=self.work.attempt,
            decode=me,
            choice=0,
            index=index,
            ids=ids,
            finish=finish,
            reused_tokens=reused_tokens,
            logprobs=logprobs,
        )
