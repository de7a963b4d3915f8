"""The tokens of one answer, and when it ends. Pure."""

from dataclasses import dataclass, replace

from kvtide.bus.messages import (
    DecodeFailed,
    DecodeWork,
    FinishReason,
    PullState,
    TokenLogprobs,
    TokenPage,
    TokenPull,
)


@dataclass(frozen=True, slots=True)
class StopRule:
    """When generation ends. Counts are of the whole answer, earlier attempts included.

    ``stop_ids`` are empty if the answer must not end by itself; ``max_new_tokens`` is
    what fits the model.
    """

    stop_ids: frozenset[int]
    min_new_tokens: int
    max_new_tokens: int

    @classmethod
    def of(
        cls, work: DecodeWork, eos_token_ids: tuple[int, ...], max_tokens: int
    ) -> "StopRule":
        """The rule of one request on a model of ``max_tokens`` context."""
        stop_ids = frozenset((*eos_token_ids, *work.stop_token_ids))
        return cls(
            frozenset() if work.ignore_eos else stop_ids,
            work.min_new_tokens,
            min(work.max_new_tokens, max_tokens - work.prompt_tokens),
        )

    def within(self, room: int) -> "StopRule":
        """The same where no more than ``room`` tokens fit behind the prompt."""
        return replace(self, max_new_tokens=min(self.max_new_tokens, room))

    def banned(self, count: int) -> tuple[int, ...]:
        """Ids that may not be drawn as token number ``count``."""
        return tuple(sorted(self.stop_ids)) if count < self.min_new_tokens else ()


class Answer:
    """What was generated, from index ``first`` of the whole answer on."""

    def __init__(self, first: int, rule: StopRule) -> None:
        """``first`` tokens came from earlier attempts."""
        self.first = first
        self.rule = rule
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.acked = first
        self.finish: FinishReason | None = None
        self.finish_acked = False
        self.end_if_full()

    @property
    def count(self) -> int:
        """Tokens of the whole answer."""
        return self.first + len(self.ids)

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return 0 if self.finish else self.rule.max_new_tokens - self.count

    @property
    def unacked(self) -> int:
        """Tokens that the gateway may not have."""
        return self.count - self.acked

    def end_if_full(self) -> None:
        """Finish when as many tokens are there as may be."""
        if self.count >= self.rule.max_new_tokens:
            self.finish = FinishReason.LENGTH

    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> tuple[int, ...]:
        """Take a drawn token; what the gateway is to be sent (nothing for a stop id).

        ``logprobs`` come with every token of an answer, or with none.

        Raises:
            ValueError: the answer has ended.
        """
        if self.finish is not None:
            raise ValueError("the answer has ended")
        if token in self.rule.stop_ids and self.count >= self.rule.min_new_tokens:
            self.finish = FinishReason.STOP
            return ()
        self.ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.end_if_full()
        return (token,)

    def since(self, index: int) -> tuple[int, ...]:
        """The tokens from ``index`` of the whole answer on."""
        return tuple(self.ids[max(0, index - self.first) :])

    def logprobs_since(self, index: int) -> tuple[TokenLogprobs, ...]:
        """Those of ``since(index)``, if they are kept at all."""
        return tuple(self.logprobs[max(0, index - self.first) :])

    def page(
        self,
        pull: TokenPull,
        state: PullState,
        failed: DecodeFailed | None,
        reused_tokens: int | None,
    ) -> TokenPage:
        """All from an index on. ``state`` is the request's, but where it has failed."""
        index = max(pull.index, self.first)
        return TokenPage(
            request=pull.request,
            attempt=pull.attempt,
            choice=pull.choice,
            index=index,
            ids=self.since(index),
            state=PullState.FAILED if failed else state,
            finish=self.finish,
            reused_tokens=reused_tokens,
            reason=failed.reason if failed else "",
            logprobs=self.logprobs_since(index),
        )

    def ack(self, index: int, *, finished: bool) -> None:
        """The gateway has all before ``index``, and the finish if it says so."""
        self.acked = max(self.acked, min(index, self.count))
        self.finish_acked |= finished and self.finish is not None
