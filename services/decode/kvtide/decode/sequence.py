"""One request's way through a decode worker. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtide.bus.messages import (
    DecodeFailed,
    DecodeTimes,
    DecodeWork,
    PullState,
    TokenPage,
    TokenPull,
    Tokens,
)
from kvtide.decode.answer import Answer, StopRule
from kvtide.decode.arrival import Arrival, Source
from kvtide.decode.events import (
    BlockCopy,
    Context,
    KeyedBlock,
    ModelLoaded,
    Row,
    Sampled,
)
from kvtide.decode.handover import Handover
from kvtide.decode.limits import DecodeLimits
from kvtide.kv import BlockKey, NodeRef, RequestRef


class BlockKeys(Protocol):
    """Makes the chained keys of one key space (``kvtide.kv.KeySpace`` is one)."""

    def key(self, parent: BlockKey | None, tokens: list[int]) -> BlockKey:
        """The key of one full block after ``parent`` (None: the first block)."""
        ...


class Phase(StrEnum):
    """Where a sequence stands.

    One that is preempted has not given its memory back yet: its blocks go to the pool
    first, then it waits again. One that is closing has its answer; only the last token's KV is still made, because
    it completes a block that the next turn will want.
    """

    WAITING = "waiting"
    PULLING = "pulling"
    FILLING = "filling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    CLOSING = "closing"
    ENDED = "ended"


_STATES = {
    Phase.WAITING: PullState.WAITING,
    Phase.PULLING: PullState.WAITING,
    Phase.FILLING: PullState.WAITING,
    Phase.RUNNING: PullState.RUNNING,
    Phase.PREEMPTED: PullState.RUNNING,
}


@dataclass(slots=True)
class Sequence:
    """A request that waits for pages, for its KV, for its turns, or for its last ack.

    ``tokens`` are the prompt and what was generated after it; the KV of the first
    ``fed`` of them is in the run while it runs. It came with ``begun`` tokens, or began
    again with as many; ``pages`` it may need in all. ``starved``: no page is there for
    its next token; ``finding``: a search for its blocks is under way. ``in_step`` and ``putting`` are
    operations of the shell that use the run: while one is under way nothing is freed.
    ``dying``: what it holds goes when they have ended; ``forgotten``: so does the
    sequence; ``abandoned``: nobody wants its blocks.
    """

    ref: RequestRef
    work: DecodeWork
    keys: BlockKeys
    block_tokens: int
    pages: int
    arrival: Arrival
    handover: Handover
    answer: Answer
    arrived_s: float
    tokens: list[int]
    chain: list[BlockKey]
    begun: int
    restarts: int = 0
    first_reused: int = 0
    starved: bool = False
    finding: bool = False
    phase: Phase = Phase.WAITING
    fed: int = 0
    opened: bool = False
    in_step: bool = False
    putting: bool = False
    puts: int = 0
    next_put: int = 0
    dying: bool = False
    forgotten: bool = False
    abandoned: bool = False
    ended_s: float = 0.0
    bound_s: float = 0.0
    complete_s: float = 0.0
    said_first: bool = False
    failed: DecodeFailed | None = field(default=None)

    @classmethod
    def of(
        cls,
        work: DecodeWork,
        keys: BlockKeys,
        model: ModelLoaded,
        limits: DecodeLimits,
        now_s: float,
    ) -> "Sequence":
        """A new sequence at the queue's end."""
        arrival = Arrival(
            len(work.tokens) - 1, model.block_tokens, model.layers, work.keys
        )
        rule = StopRule.of(work, model.eos_token_ids, model.max_tokens)
        answer = Answer(len(work.tokens) - work.prompt_tokens, rule)
        return cls(
            ref=RequestRef(work.request, work.attempt),
            work=work,
            keys=keys,
            block_tokens=model.block_tokens,
            pages=-(-(len(work.tokens) + answer.left) // model.block_tokens),
            arrival=arrival,
            handover=Handover(work.prefill, arrival, limits),
            answer=answer,
            arrived_s=now_s,
            tokens=list(work.tokens),
            chain=list(work.keys),
            begun=len(work.tokens),
        )

    def restart(self, layers: int, limits: DecodeLimits) -> None:
        """Its memory is gone: what it has said goes on from what can be had again."""
        self.first_reused = self.reused_tokens
        self.begun = len(self.tokens)
        keys = self.chain[: self.begun // self.block_tokens]
        self.arrival = Arrival(self.begun - 1, self.block_tokens, layers, keys)
        self.handover = Handover(None, self.arrival, limits)
        self.phase = Phase.WAITING
        self.restarts += 1
        self.fed = 0
        self.next_put = 0
        self.starved = False
        self.opened = False

    def found(self, copies: Iterable[BlockCopy]) -> None:
        """The search for its blocks has ended with these."""
        self.finding = False
        if self.phase is Phase.PULLING:
            self.arrival.offer(copies)

    def keyed_blocks(self) -> tuple[KeyedBlock, ...]:
        """The full blocks that it needs to begin again."""
        full = (self.begun - 1) // self.block_tokens
        return tuple(KeyedBlock(i, key) for i, key in enumerate(self.chain[:full]))

    def first_pages(self, limits: DecodeLimits) -> int:
        """Pages to be bound when it begins."""
        ahead = min(self.answer.left, limits.growth_blocks * self.block_tokens)
        return self._pages(len(self.tokens) + max(1, ahead))

    @property
    def next_pages(self) -> int:
        """Pages that its next row needs."""
        return self._pages(len(self.tokens))

    def _pages(self, tokens: int) -> int:
        return min(self.pages, -(-tokens // self.block_tokens))

    @property
    def deadline_s(self) -> float:
        """When its first token must be there."""
        return self.arrived_s + self.work.deadline_ms / 1000

    @property
    def busy(self) -> bool:
        """Whether the shell uses its run."""
        return self.in_step or self.putting

    def next_row(self) -> Row:
        """Feed what was drawn last, and draw the next."""
        return self._row(self.fed, len(self.tokens), draw=True)

    def closing_row(self) -> Row:
        """Feed the last token of the answer, for its KV alone."""
        return self._row(self.fed, len(self.tokens), draw=False)

    @property
    def wants_closing(self) -> bool:
        """Whether the last token completes a block, and was not fed."""
        full = len(self.tokens) % self.block_tokens == 0
        return full and self.fed == len(self.tokens) - 1

    @property
    def fill_tokens(self) -> int:
        """Tokens of its prompt that it will have to compute itself, as far as is known.

        None while prefill may still bring them, or a search for them is to come.
        """
        if self.phase is Phase.FILLING:
            return self.arrival.absent_tokens
        to_search = self.phase is Phase.WAITING and bool(self.restarts)
        if self.handover.prefill is not None or self.finding or to_search:
            return 0
        # copies that it came with are offered when it begins
        copies = 0 if self.opened else len(self.work.reuse)
        return max(0, self.arrival.absent_tokens - copies * self.block_tokens)

    def fill_row(self, limit: int) -> Row:
        """Compute the next missing blocks, about ``limit`` tokens; draw if they end it.

        The last token of the prompt goes along with the last missing ones.
        """
        missing = self.arrival.missing()
        assert missing is not None  # noqa: S101 - it would run, not fill
        start, end = missing
        size = self.block_tokens
        limit = max(size, limit // size * size)
        last = self.begun - 1
        if end == last:
            end = last + 1
        end = min(end, start + limit)
        return self._row(start, end, draw=end > last)

    def _row(self, start: int, end: int, *, draw: bool) -> Row:
        sampling = self.work.sampling if draw else None
        banned = self.answer.rule.banned(self.answer.count) if draw else ()
        context = None
        if sampling is not None and sampling.depends:
            border = self.work.prompt_tokens
            context = Context(tuple(self.tokens[:border]), tuple(self.tokens[border:]))
        fed = tuple(self.tokens[start:end])
        return Row(self.ref, start, fed, sampling, banned, context)

    def computed(self, row: Row) -> None:
        """The row's tokens are in the run."""
        end = row.start + len(row.tokens)
        if self.phase is Phase.FILLING:
            self.arrival.computed(row.start, end)
        if self.phase is not Phase.FILLING or row.sampling is not None:
            self.fed = end

    def drawn(self, drawn: Sampled, me: NodeRef, now_s: float) -> Tokens:
        """Take a drawn token; what the gateway is told."""
        index = self.answer.count
        ids = self.answer.add(drawn.token, drawn.logprobs)
        self.tokens.extend(ids)
        return self.words(index, ids, me, now_s)

    def words(
        self, index: int, ids: tuple[int, ...], me: NodeRef, now_s: float
    ) -> Tokens:
        """The event for these tokens; the first one says how it came to be."""
        first = not self.said_first
        self.said_first = True
        return Tokens(
            request=self.ref.request,
            attempt=self.ref.attempt,
            decode=me,
            choice=0,
            index=index,
            ids=ids,
            finish=self.answer.finish,
            reused_tokens=self.reused_tokens if first else None,
            times=self._times(now_s) if first else None,
            logprobs=self.answer.logprobs_since(index) if ids else (),
        )

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt whose KV came from the pool when it came first."""
        if self.restarts:
            return self.first_reused
        return min(self.arrival.reused_tokens, self.work.prompt_tokens)

    def _times(self, now_s: float) -> DecodeTimes:
        return DecodeTimes(
            wait_ms=(self.bound_s - self.arrived_s) * 1000,
            pull_ms=(self.complete_s - self.bound_s) * 1000,
            first_step_ms=(now_s - self.complete_s) * 1000,
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
        reused_tokens = self.reused_tokens if self.said_first else None
        return self.answer.page(pull, state, self.failed, reused_tokens)

    def take_blocks(self, limit: int) -> tuple[KeyedBlock, ...]:
        """Full blocks that were made here and not yet offered to the pool."""
        size = self.block_tokens
        by_prefill = (self.begun - 1) // size
        taken: list[KeyedBlock] = []
        while self.next_put < self.fed // size and len(taken) < limit:
            block = self.next_put
            self.next_put += 1
            if block == len(self.chain):
                parent = self.chain[-1] if self.chain else None
                fill = self.tokens[block * size : (block + 1) * size]
                self.chain.append(self.keys.key(parent, fill))
            source = self.arrival.source(block)
            pooled = source is Source.POOL or (
                source is Source.HANDOVER and block < by_prefill
            )
            if not pooled:
                taken.append(KeyedBlock(block, self.chain[block]))
        return tuple(taken)
