"""Verified reads of blocks and parts, straight into the caller's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtide.bus import Node
from kvtide.kv import BlockHeader, Layout, Located, SlotRef, SpaceTags, Tier
from kvtide.pool.copies import BadBytes, BlockCheck, checked_header
from kvtide.pool.limits import PoolLimits
from kvtide.pool.metrics import PoolMetrics
from kvtide.pool.near import BlockJob, NearReader
from kvtide.pool.outcomes import MissReason, PartRead, PartSink, ReadOutcome
from kvtide.pool.reader import SlotRead, SlotReader
from kvtide.pool.reports import BadCopyReports
from kvtide.pool.staging import Stager
from kvtide.transfer import TransferResult

_NOT_STAGED = ReadOutcome(MissReason.NOT_STAGED, detail="its store did not stage it")


@dataclass(frozen=True, slots=True)
class _BlockRead:
    """One block under way: its header's private bytes, and the parts' targets.

    ``offsets`` are those of the parts in the slot.
    """

    located: Located
    header: bytearray
    numbers: Sequence[int]
    offsets: Sequence[int]
    targets: Sequence[memoryview]

    def slot_read(self) -> SlotRead:
        """The ranges to copy: the header first."""
        targets = [memoryview(self.header), *self.targets]
        return SlotRead(self.located.slot, [0, *self.offsets], targets)


class BlockReader:
    """The reading half of the pool's client."""

    def __init__(
        self,
        node: Node,
        reports: BadCopyReports,
        limits: PoolLimits,
        metrics: PoolMetrics,
        stager: Stager,
    ) -> None:
        """Reads go through the node's endpoint."""
        self._stager = stager
        self._clock = node.clock
        self._slots = SlotReader(node, limits)
        self._reports = reports
        self._metrics = metrics
        self._check: BlockCheck | None = None
        self._near = NearReader(self._slots, node, self._bad)

    async def headers(
        self,
        located: Sequence[Located],
        tags: SpaceTags,
        layout: Layout,
        *,
        timeout_s: float,
        purpose: str,
    ) -> list[BlockHeader | None]:
        """See ``PoolClient.read_headers``."""
        found: list[BlockHeader | None] = [None] * len(located)
        places = [i for i, each in enumerate(located) if each.slot.tier is not Tier.SSD]
        reads = [_BlockRead(located[i], _header(layout), (), (), ()) for i in places]
        results = await self._results(reads, timeout_s, purpose)
        for i, read, result in zip(places, reads, results, strict=True):
            if isinstance(result, ReadOutcome):
                self._metrics.read_all(purpose, (result,))
                continue
            try:
                found[i] = checked_header(read.header, read.located, tags, layout)
            except BadBytes as bad:
                self._bad(read.located, bad)
        return found

    async def blocks(
        self,
        located: Sequence[Located],
        tags: SpaceTags,
        layout: Layout,
        sinks: Sequence[PartSink],
        *,
        timeout_s: float,
        purpose: str,
        parts: range | None,
    ) -> list[ReadOutcome]:
        """See ``PoolClient.read_blocks``."""
        started_s = self._clock.monotonic()
        numbers = range(layout.parts) if parts is None else parts
        outcomes = [_NOT_STAGED] * len(located)
        check = self._check
        if check is None or check.tags != tags or check.layout != layout:
            check = self._check = BlockCheck(tags, layout)
        job = BlockJob(check, numbers, started_s + timeout_s, purpose)
        left = list(range(len(located)))
        while left:
            left_s = job.deadline_s - self._clock.monotonic()
            wanted = [located[place] for place in left]
            if not any(each.slot.tier is Tier.SSD for each in wanted):
                await self._read(
                    dict(zip(left, wanted, strict=True)), sinks, job, outcomes
                )
                break
            async with self._stager.staged(wanted, timeout_s=left_s) as there:
                asked = {
                    place: each
                    for place, each in zip(left, there, strict=True)
                    if each is not None
                }
                await self._read(asked, sinks, job, outcomes)
            # a store stages as much at once as it has room for; what had none may now
            left = [place for place in left if place not in asked] if asked else []
        self._count(outcomes, purpose, started_s)
        return outcomes

    async def parts(
        self,
        reads: Sequence[PartRead],
        layout: Layout,
        *,
        timeout_s: float,
        purpose: str,
    ) -> list[ReadOutcome]:
        """See ``PoolClient.read_parts``."""
        started_s = self._clock.monotonic()
        by_slot: dict[SlotRef, list[int]] = {}
        for i, read in enumerate(reads):
            by_slot.setdefault(read.slot, []).append(i)
        slot_reads = [
            SlotRead(
                slot,
                [layout.part_offset(reads[i].part) for i in members],
                [reads[i].into for i in members],
            )
            for slot, members in by_slot.items()
        ]
        results = await self._slots.read(
            slot_reads, timeout_s=timeout_s, purpose=purpose
        )
        outcomes = [ReadOutcome()] * len(reads)
        for members, result in zip(by_slot.values(), results, strict=True):
            for place, i in enumerate(members):
                outcomes[i] = self._part(reads[i], result, place)
        self._count(outcomes, purpose, started_s)
        return outcomes

    # ---- inside

    async def _read(
        self,
        asked: Mapping[int, Located],
        sinks: Sequence[PartSink],
        job: BlockJob,
        outcomes: list[ReadOutcome],
    ) -> None:
        """Read blocks that are in DRAM."""
        far = await self._near.read(asked, sinks, job, outcomes)
        if far:
            await self._read_far(far, sinks, job, outcomes)

    async def _read_far(
        self,
        asked: Mapping[int, Located],
        sinks: Sequence[PartSink],
        job: BlockJob,
        outcomes: list[ReadOutcome],
    ) -> None:
        """Read blocks from wherever they are, all under way together."""
        layout = job.check.layout
        offsets = list(map(layout.part_offset, job.numbers))
        reads = [
            _BlockRead(
                each,
                _header(layout),
                job.numbers,
                offsets,
                list(map(sinks[place], job.numbers)),
            )
            for place, each in asked.items()
        ]
        left_s = job.deadline_s - self._clock.monotonic()
        results = await self._results(reads, left_s, job.purpose)
        for place, read, result in zip(asked, reads, results, strict=True):
            outcomes[place] = self._verified(read, result, job)

    async def _results(
        self,
        reads: Sequence[_BlockRead],
        timeout_s: float,
        purpose: str,
    ) -> list[TransferResult | ReadOutcome]:
        return await self._slots.read(
            [read.slot_read() for read in reads],
            timeout_s=timeout_s,
            purpose=purpose,
        )

    def _verified(
        self,
        read: _BlockRead,
        result: TransferResult | ReadOutcome,
        job: BlockJob,
    ) -> ReadOutcome:
        if isinstance(result, ReadOutcome):
            return result
        check = job.check
        lengths = list(map(len, read.targets))
        try:
            if result.xxh3[0] != read.located.header_xxh3:
                # it says what that means
                checked_header(read.header, read.located, check.tags, check.layout)
            job.verify(read.located, read.header, lengths, result.xxh3[1:])
        except BadBytes as bad:
            return self._bad(read.located, bad)
        return check.outcome(sum(lengths), result.path)

    def _part(
        self,
        read: PartRead,
        result: TransferResult | ReadOutcome,
        place: int,
    ) -> ReadOutcome:
        if isinstance(result, ReadOutcome):
            return result
        if result.xxh3[place] == read.xxh3:
            return ReadOutcome(nbytes=len(read.into), path=result.path)
        detail = f"the checksum of part {read.part} differs"
        bad = BadBytes(MissReason.CORRUPT, detail)
        if read.located is not None:
            return self._bad(read.located, bad)
        self._metrics.bad_copies.labels(bad.reason.value).inc()
        return ReadOutcome(bad.reason, detail=detail)

    def _bad(self, located: Located, bad: BadBytes) -> ReadOutcome:
        self._reports.report(located, bad.reason, bad.detail)
        return ReadOutcome(bad.reason, detail=bad.detail)

    def _count(
        self, outcomes: Sequence[ReadOutcome], purpose: str, started_s: float
    ) -> None:
        self._metrics.read_all(purpose, outcomes)
        took_s = self._clock.monotonic() - started_s
        self._metrics.read_s.labels(purpose).observe(took_s)


def _header(layout: Layout) -> bytearray:
    return bytearray(layout.header_bytes)
