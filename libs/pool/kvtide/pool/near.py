"""Blocks in shared memory that is mapped here: read and verified one by one, at once.

A batch of blocks that is prepared, copied and verified in three passes, in another thread,
was seen to take half as long again as one that is done block by block: what Python
touches for a block is in the cache still when the next step comes to it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtide.bus import Node
from kvtide.kv import Located
from kvtide.pool.copies import BadBytes, BlockCheck, check_parts, checked_header
from kvtide.pool.outcomes import PartSink, ReadOutcome
from kvtide.pool.reader import SlotReader
from kvtide.runtime.tracing import NO_SPAN, Span, SpanKind
from kvtide.transfer import Near

MOST_BYTES = 2 << 20
"""Of a block. To copy more takes longer than to wake a thread and the loop again."""

HOLD_S = 0.002
"""After so long others get their turn in the loop, between two blocks. Less than the 5 ms
for which a thread may keep the interpreter anyway."""

Bad = Callable[[Located, BadBytes], ReadOutcome]


@dataclass(frozen=True, slots=True)
class BlockJob:
    """What is wanted of each block of a batch: its parts ``numbers``."""

    check: BlockCheck
    numbers: range
    deadline_s: float
    purpose: str

    @property
    def whole(self) -> bool:
        """All parts."""
        return self.numbers == range(self.check.layout.parts)

    def verify(
        self,
        located: Located,
        raw: bytes | bytearray,
        lengths: Sequence[int],
        xxh3: Sequence[int],
    ) -> None:
        """Compare a header, whose checksum is right, and the wanted parts with the promise.

        Raises:
            BadBytes: something differs; it says what.
        """
        check = self.check
        if self.whole and check.is_promised(located, raw, lengths, xxh3):
            return
        header = checked_header(raw, located, check.tags, check.layout)
        check_parts(header, self.numbers, lengths, xxh3)


class NearReader:
    """Reads what is near; what is not, or not as it should be, is for others."""

    def __init__(self, slots: SlotReader, node: Node, bad: Bad) -> None:
        """``bad`` reports a copy, and says what comes of the read."""
        self._slots = slots
        self._clock = node.clock
        self._tracer = node.tracer
        self._bad = bad

    async def read(
        self,
        asked: Mapping[int, Located],
        sinks: Sequence[PartSink],
        job: BlockJob,
        outcomes: list[ReadOutcome],
    ) -> dict[int, Located]:
        """Fill in ``outcomes`` by place; what of ``asked`` is left to be read."""
        layout, numbers = job.check.layout, job.numbers
        if len(numbers) * layout.part_bytes > MOST_BYTES or numbers.step != 1:
            return dict(asked)
        left: dict[int, Located] = {}
        clock, deadline_s = self._clock, job.deadline_s
        near: Near | None = None
        known: tuple[str, int, int] | None = None
        span = NO_SPAN
        with ExitStack() as stack:
            now_s = since_s = clock.monotonic()
            for place, located in asked.items():
                slot = located.slot
                if known != (slot.node, slot.epoch, slot.arena):
                    # those of one store mostly come together
                    known = (slot.node, slot.epoch, slot.arena)
                    near = await self._slots.near(slot, deadline_s, job.purpose)
                    if near is not None:
                        if span is NO_SPAN:
                            span = stack.enter_context(self._span(job, len(asked)))
                        stack.enter_context(near)
                outcome = None
                if near is not None and now_s < deadline_s:
                    outcome = self._block(near, located, sinks[place], job)
                if outcome is None:
                    left[place] = located
                    continue
                outcomes[place] = outcome
                now_s = clock.monotonic()
                if now_s - since_s > HOLD_S:
                    await clock.sleep(0)
                    now_s = since_s = clock.monotonic()
            if span is not NO_SPAN:
                done = [outcomes[place] for place in asked if place not in left]
                span.note(
                    bytes=sum(each.nbytes for each in done),
                    missed=sum(not each.ok for each in done),
                    path="shm",
                )
        return left

    def _span(self, job: BlockJob, slots: int) -> Span:
        return self._tracer.span(
            "transfer", kind=SpanKind.CLIENT, purpose=job.purpose, slots=slots
        )

    def _block(
        self, near: Near, located: Located, sink: PartSink, job: BlockJob
    ) -> ReadOutcome | None:
        check, numbers = job.check, job.numbers
        slot = located.slot
        targets = list(map(sink, numbers))
        lengths = list(map(len, targets))
        # of a block with fewer tokens the parts do not lie side by side
        full = lengths.count(check.part_bytes) == len(numbers)
        if not numbers or not full or check.slot_bytes > slot.length:
            return None
        raw = near.peek(slot.offset, check.header_bytes)
        if raw is None:
            return None
        try:
            if xxh3_64_intdigest(raw) != located.header_xxh3:
                # it says what that means
                checked_header(raw, located, check.tags, check.layout)
            first = check.header_bytes + numbers[0] * check.part_bytes
            xxh3 = near.read(slot.offset + first, targets)
            if xxh3 is None:
                return None
            job.verify(located, raw, lengths, xxh3)
        except BadBytes as bad:
            return self._bad(located, bad)
        return check.outcome(len(numbers) * check.part_bytes, "shm")
