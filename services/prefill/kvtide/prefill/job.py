"""One prompt's way through a prefill worker. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvtide.bus.messages import (
    MOST_CHUNK_TIMES,
    ChunkTime,
    HandoverCopy,
    HandoverPlan,
    HandoverSlot,
    HandoverState,
    PartSums,
    PrefillDone,
    PrefillFailed,
    PrefillTimes,
    PrefillWork,
    PutBlock,
    PutSlot,
)
from kvtide.kv import BlockKey, Located, NodeRef, RequestRef
from kvtide.prefill.events import ChunkSpec, Filled
from kvtide.worker.steps import StepShape


class Phase(StrEnum):
    """Where a job stands.

    Those in ``_BUSY`` have an operation of the shell under way; loads and a commit may
    be under way in others, too.
    """

    QUEUED = "queued"
    CHECKING = "checking"
    GRANTING = "granting"
    READY = "ready"
    COMPUTING = "computing"
    COMMITTING = "committing"
    SETTLED = "settled"


_BUSY = frozenset({Phase.CHECKING, Phase.GRANTING, Phase.COMPUTING})
_WAITING = frozenset({Phase.QUEUED, Phase.CHECKING, Phase.GRANTING, Phase.READY})


@dataclass(slots=True)
class Job:
    """A prompt that is waiting, being computed, or computed and not yet taken.

    ``end`` is the number of tokens whose KV this worker will make or load, at first all
    but the last; ``at`` are those that it has, or that a load promises. ``loads`` are
    under way, by their first block, with the blocks that each promises; ``short`` is
    where a promise was broken while a step ran, ``gated`` that a step has waited for it
    in vain. ``passed_s`` is since when it waits for blocks of another, ``behind`` that this
    one is another worker's; ``told``, that other workers know of this job. ``dying`` means that what the job holds
    is let go as soon as the shell's operation under way has ended; ``forgotten``, that
    the job itself then goes too.
    """

    ref: RequestRef
    work: PrefillWork
    block_tokens: int
    arrived_s: float
    end: int
    reuse: tuple[Located, ...] = ()
    at: int = 0
    reused_tokens: int = 0
    phase: Phase = Phase.QUEUED
    opened: bool = False
    leased: bool = False
    loads: dict[int, int] = field(default_factory=dict[int, int])
    short: int | None = None
    gated: bool = False
    committing: bool = False
    commit_at: int = 0
    committed: int = 0
    passed_s: float | None = None
    behind: bool = False
    told: bool = False
    asked_from: int = 0
    dying: bool = False
    forgotten: bool = False
    taken: bool = False
    settled_s: float = 0.0
    started_s: float = 0.0
    load_ms: float = 0.0
    compute_ms: float = 0.0
    chunk_times: list[ChunkTime] = field(default_factory=list[ChunkTime])
    plan: HandoverPlan | None = None
    slots: list[HandoverSlot] = field(default_factory=list[HandoverSlot])
    copies: list[HandoverCopy] = field(default_factory=list[HandoverCopy])
    puts: dict[int, int] = field(default_factory=dict[int, int])
    parts: list[PartSums] = field(default_factory=list[PartSums])
    messages: int = 0
    done: PrefillDone | None = None
    failed: PrefillFailed | None = None

    @classmethod
    def of(cls, work: PrefillWork, block_tokens: int, now_s: float) -> "Job":
        """A new job at the queue's end."""
        ref = RequestRef(work.request, work.attempt)
        job = cls(ref, work, block_tokens, now_s, len(work.tokens) - 1)
        job.reuse = job.right_copies()
        return job

    @property
    def deadline_s(self) -> float:
        """When it must be settled."""
        return self.arrived_s + self.work.deadline_ms / 1000

    @property
    def blocks(self) -> int:
        """Blocks that hold its KV, the unfinished last one included."""
        return -(-self.end // self.block_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Room for all its blocks, whole."""
        return max(1, self.blocks) * self.block_tokens

    @property
    def busy(self) -> bool:
        """Whether an operation of the shell on it is under way."""
        return self.phase in _BUSY or bool(self.loads) or self.committing

    @property
    def waits(self) -> bool:
        """Whether it is in the queue, or waits for its next chunk."""
        return self.phase in _WAITING

    @property
    def left(self) -> int:
        """Tokens still to be computed."""
        return 0 if self.phase is Phase.SETTLED else self.end - self.at

    @property
    def shape_left(self) -> StepShape:
        """What is still to be computed, as if in one step; if it is queued, at best."""
        start = self.at
        if self.phase is Phase.QUEUED:
            start = min(len(self.reuse) * self.block_tokens, self.end)
        return StepShape.of(
            [(start, self.end)] if self.left and start < self.end else []
        )

    def shape_after(self, made: Collection[BlockKey]) -> StepShape:
        """``shape_left``, if those blocks are in the pool by then."""
        if self.phase is not Phase.QUEUED:
            return self.shape_left
        block = len(self.reuse)
        while block < self.end // self.block_tokens and self.work.keys[block] in made:
            block += 1
        start = min(block * self.block_tokens, self.end)
        return StepShape.of([(start, self.end)] if start < self.end else [])

    @property
    def unmade(self) -> tuple[BlockKey, ...]:
        """The full blocks that are not in the pool yet, as far as it knows."""
        if self.phase is Phase.QUEUED:
            return self.work.keys[len(self.reuse) : self.end // self.block_tokens]
        return self.making

    @property
    def due_s(self) -> float:
        """When its first token is wanted."""
        target_ms = self.work.ttft_ms
        late_ms = self.work.deadline_ms
        wanted_ms = late_ms if target_ms is None else min(target_ms, late_ms)
        return self.arrived_s + wanted_ms / 1000

    @property
    def next_key(self) -> BlockKey | None:
        """The first full block that it will want made, as far as it knows."""
        block = max(self.first_block, len(self.reuse))
        return self.work.keys[block] if block < self.end // self.block_tokens else None

    @property
    def making(self) -> tuple[BlockKey, ...]:
        """The full blocks that it is making, and will put into the pool."""
        if self.phase in (Phase.QUEUED, Phase.SETTLED) or self.dying:
            return ()
        first = max(self.first_block, self.committed)
        return self.work.keys[first : self.end // self.block_tokens]

    def found(self, copies: Mapping[BlockKey, Located]) -> None:
        """Others have put these into the pool; what follows its reuse is reused, too."""
        while len(self.reuse) < self.end // self.block_tokens:
            copy = copies.get(self.work.keys[len(self.reuse)])
            if copy is None:
                break
            self.reuse += (copy,)

    def right_copies(self) -> tuple[Located, ...]:
        """The copies that can be loaded: from the first block on, each with its key.

        A copy with another key is a miss, whatever its header says: the descriptor
        alone would vouch for itself.
        """
        copies = self.work.reuse[: self.blocks]
        for block, copy in enumerate(copies):
            if not self._is_copy_of(block, copy):
                return copies[:block]
        return copies

    def _is_copy_of(self, block: int, copy: Located) -> bool:
        keys = self.work.keys
        return block < len(keys) and copy.key == keys[block]

    def fill(self, block: int) -> int:
        """Tokens of its KV that lie in block number ``block``."""
        return min(self.block_tokens, self.end - block * self.block_tokens)

    def promised(self, blocks: int) -> None:
        """``blocks`` more blocks of the prefix come from the pool."""
        blocks += self.first_block
        self.reused_tokens = self.at = min(blocks * self.block_tokens, self.end)

    def loaded(self, first: int, blocks: int) -> None:
        """The load from block ``first`` on has ended, with ``blocks`` of what it should."""
        promised = self.loads.pop(first, 0)
        if blocks < promised:
            reached = (first + blocks) * self.block_tokens
            self.short = reached if self.short is None else min(self.short, reached)
        if self.phase is not Phase.COMPUTING:
            self.fall_back()

    def copies_from(self, first: int, count: int) -> tuple[Located, ...]:
        """The copies that a load of ``count`` blocks from ``first`` on has read."""
        known = dict(enumerate(self.reuse))
        known.update((copy.block, copy.located) for copy in self.copies)
        return tuple(
            known[block] for block in range(first, first + count) if block in known
        )

    def fall_back(self) -> None:
        """What was promised and did not come is to be computed after all."""
        if self.short is not None:
            self.at = min(self.at, self.short)
            self.reused_tokens = min(self.reused_tokens, self.short)
            self.short = None
        if not self.loads:
            self.gated = False

    @property
    def first_block(self) -> int:
        """The first block that is not wholly reused."""
        return -(-self.reused_tokens // self.block_tokens)

    def wanted(self) -> tuple[PutBlock, ...]:
        """The blocks to be computed, as the store must be asked for them."""
        self.asked_from = self.first_block
        return tuple(
            PutBlock(
                self.work.keys[block]
                if self.fill(block) == self.block_tokens
                else None,
                self.fill(block),
            )
            for block in range(self.first_block, self.blocks)
        )

    def granted(self, slots: tuple[PutSlot, ...]) -> bool:
        """Take what the store gave, one answer for each wanted block; whether it helps.

        The first block that has neither a slot nor a copy ends the work: what can't
        be handed over is decode's to compute. So does the last slot: what comes after
        it nobody needs from here.
        """
        for put, answer in enumerate(slots):
            block = self.asked_from + put
            if answer.slot is not None:
                self.slots.append(HandoverSlot(block, self.fill(block), answer.slot))
                self.puts[block] = put
            elif answer.existing is not None and self._is_copy_of(
                block, answer.existing
            ):
                self.copies.append(HandoverCopy(block, answer.existing))
            else:
                break
        in_pool = self.first_block + len(self.ahead)
        served = self.slots[-1].block + 1 if self.slots else in_pool
        self.end = min(self.end, max(served * self.block_tokens, self.at))
        return not slots or bool(self.slots or self.copies)

    @property
    def ahead(self) -> tuple[Located, ...]:
        """Copies that follow the reused prefix without a gap: it can be longer."""
        first = self.first_block
        found = [copy for copy in self.copies if copy.block >= first]
        return tuple(
            copy.located
            for place, copy in enumerate(found)
            if copy.block == first + place
        )

    def make_plan(self, me: NodeRef) -> HandoverPlan:
        """What decode is told that it will get from here.

        Of copies that were found since the placement decode hears here.
        """
        since = range(len(self.work.reuse), min(len(self.reuse), self.first_block))
        found = [HandoverCopy(block, self.reuse[block]) for block in since]
        self.plan = HandoverPlan(
            request=self.ref.request,
            attempt=self.ref.attempt,
            prefill=me,
            first_block=self.first_block,
            slots=tuple(self.slots),
            copies=(*found, *self.copies),
        )
        return self.plan

    def chunk(self, tokens: int) -> ChunkSpec:
        """The next chunk, of at most ``tokens``."""
        end = min(self.end, self.at + tokens)
        size = self.block_tokens
        filled = tuple(
            Filled(block, self.fill(block), self.puts[block])
            for block in range(self.at // size, -(-end // size))
            if block in self.puts and block * size + self.fill(block) <= end
        )
        return ChunkSpec(self.ref, self.at, end, filled)

    def computed(self, chunk: ChunkSpec, took_ms: float, now_s: float) -> None:
        """A chunk is in the worker's pages."""
        self.at = chunk.end
        if len(self.chunk_times) < MOST_CHUNK_TIMES:
            self.chunk_times.append(
                ChunkTime(
                    tokens=chunk.end - chunk.start,
                    end_ms=(now_s - self.arrived_s) * 1000,
                    took_ms=took_ms,
                )
            )

    def finish(self, me: NodeRef) -> PrefillDone:
        """All is computed and committed."""
        queue_ms = (self.started_s - self.arrived_s) * 1000
        self.done = PrefillDone(
            request=self.ref.request,
            attempt=self.ref.attempt,
            prefill=me,
            reused_tokens=self.reused_tokens,
            computed_tokens=self.at - self.reused_tokens,
            messages=self.messages,
            times=PrefillTimes(
                queue_ms=queue_ms,
                load_ms=self.load_ms,
                compute_ms=self.compute_ms,
                chunks=tuple(self.chunk_times),
            ),
        )
        return self.done

    def fail(self, me: NodeRef, code: str, reason: str) -> PrefillFailed:
        """The job ends without its KV."""
        self.failed = PrefillFailed(
            request=self.ref.request,
            attempt=self.ref.attempt,
            prefill=me,
            code=code,
            reason=reason,
        )
        return self.failed

    def state(self) -> HandoverState:
        """All that was said so far."""
        return HandoverState(
            request=self.ref.request,
            attempt=self.ref.attempt,
            plan=self.plan,
            parts=tuple(self.parts),
            done=self.done,
            failed=self.failed,
        )
