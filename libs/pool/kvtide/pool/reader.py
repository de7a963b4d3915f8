"""Optimistic reads: copy one-sided, verify the private copy, call a mismatch a miss."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import add

from kvtide.bus import Node
from kvtide.kv import NodeRef, SlotRef
from kvtide.pool.limits import PoolLimits
from kvtide.pool.outcomes import MissReason, ReadOutcome
from kvtide.runtime.tracing import NO_SPAN, TRACE, Fact, SpanKind, recorded
from kvtide.transfer import (
    Near,
    Priority,
    ReadSlice,
    RegionHandle,
    StaleEpoch,
    TimedOut,
    Transfer,
    TransferError,
    TransferPeer,
    TransferResult,
)

STARTS_A_TURN = 8

GROUP_BYTES = 16 << 20
"""Slots of one store in shared memory are read together up to this many bytes: a transfer
costs as much as copying a tenth of a block. What fails there fails for the store."""

GROUP_SLICES = 480

_slice_of = partial(tuple.__new__, ReadSlice)  # pyright: ignore[reportUnknownMemberType]
"""Without a call in Python for each of hundreds."""


@dataclass(frozen=True, slots=True)
class SlotRead:
    """Ranges of one slot: ``targets[i]`` is filled from ``offsets[i]`` of it on."""

    slot: SlotRef
    offsets: Sequence[int]
    targets: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a store's bytes can be had."""

    peer: TransferPeer
    arenas: tuple[RegionHandle, ...]


_NOT_STARTED = ReadOutcome(MissReason.UNREACHABLE, detail="nothing was read")


class SlotReader:
    """Reads ranges of many slots of many stores in one go; never raises for a store."""

    def __init__(self, node: Node, limits: PoolLimits) -> None:
        """Peers are kept by the endpoint, one for each life of a store."""
        self._node = node
        self._limits = limits
        self._unreachable: dict[NodeRef, float] = {}

    async def read(
        self, reads: Sequence[SlotRead], *, timeout_s: float, purpose: str
    ) -> list[TransferResult | ReadOutcome]:
        """For each slot its bytes' checksums, or why there are none.

        All are under way at once. When this returns or raises, no target is touched
        any more.
        """
        with self._node.tracer.span(
            "transfer", kind=SpanKind.CLIENT, purpose=purpose, slots=len(reads)
        ) as span:
            found = await self._read(reads, timeout_s, purpose)
            if span is not NO_SPAN:
                span.note(**_facts(found))
            return found

    async def _read(
        self, reads: Sequence[SlotRead], timeout_s: float, purpose: str
    ) -> list[TransferResult | ReadOutcome]:
        deadline_s = self._node.clock.monotonic() + timeout_s
        sources: dict[NodeRef, _Source | ReadOutcome] = {}
        for owner in dict.fromkeys(read.slot.owner for read in reads):
            sources[owner] = await self._source(owner, deadline_s)
        started: list[_Started] = []
        try:
            for number, places in enumerate(_groups(reads, sources)):
                if number and number % STARTS_A_TURN == 0:
                    # hundreds of blocks must not hold up the loop
                    await self._node.clock.sleep(0)
                left_s = deadline_s - self._node.clock.monotonic()
                group = [reads[place] for place in places]
                source = sources[group[0].slot.owner]
                started += self._start_all(group, places, source, left_s, purpose)
            found: list[TransferResult | ReadOutcome] = [_NOT_STARTED] * len(reads)
            for each in started:
                each.hand_out(await _result(each.transfer), found)
        except BaseException:
            await _abandon([each.transfer for each in started])
            raise
        return found

    async def near(self, slot: SlotRef, deadline_s: float, purpose: str) -> Near | None:
        """The slot's arena, if it can be read at once; else ``read`` says why not."""
        source = await self._source(slot.owner, deadline_s)
        if isinstance(source, ReadOutcome) or not 0 <= slot.arena < len(source.arenas):
            return None
        return source.peer.near(source.arenas[slot.arena], purpose=purpose)

    async def _source(self, owner: NodeRef, deadline_s: float) -> _Source | ReadOutcome:
        member = self._node.roster.get(owner.node)
        if member is None or member.ref != owner or member.beat.transfer is None:
            return ReadOutcome(MissReason.STORE_GONE, detail=f"{owner.node} is gone")
        now_s = self._node.clock.monotonic()
        if self._unreachable.get(owner, now_s) > now_s:
            return ReadOutcome(MissReason.UNREACHABLE, detail="a moment ago")
        timeout_s = min(self._limits.connect_timeout_s, deadline_s - now_s)
        if timeout_s <= 0:
            return ReadOutcome(MissReason.TIMED_OUT, detail="no time was left")
        try:
            peer = await self._node.endpoint.connect(
                member.beat.transfer, timeout_s=timeout_s
            )
        except TransferError as error:
            self._unreachable = {
                ref: end_s for ref, end_s in self._unreachable.items() if end_s > now_s
            }
            now_s = self._node.clock.monotonic()
            self._unreachable[owner] = now_s + self._limits.unreachable_s
            return _missed(error)
        return _Source(peer, member.beat.arenas)

    def _start_all(
        self,
        group: Sequence[SlotRead],
        places: Sequence[int],
        source: _Source | ReadOutcome,
        timeout_s: float,
        purpose: str,
    ) -> list["_Started"]:
        """All in one transfer; each in its own where one can't even begin."""
        counts = [len(read.targets) for read in group]
        together = self._start(group, source, timeout_s, purpose)
        if len(group) == 1 or isinstance(together, Transfer):
            return [_Started(together, places, counts)]
        return [
            _Started(self._start([read], source, timeout_s, purpose), [place], [count])
            for read, place, count in zip(group, places, counts, strict=True)
        ]

    def _start(
        self,
        group: Sequence[SlotRead],
        source: _Source | ReadOutcome,
        timeout_s: float,
        purpose: str,
    ) -> Transfer | ReadOutcome:
        if isinstance(source, ReadOutcome):
            return source
        if timeout_s <= 0:
            return ReadOutcome(MissReason.TIMED_OUT, detail="no time was left")
        slices: list[ReadSlice] = []
        for read in group:
            slot = read.slot
            if not 0 <= slot.arena < len(source.arenas):
                return ReadOutcome(MissReason.STALE, detail="there is no such arena")
            handle = source.arenas[slot.arena]
            ends = map(add, read.offsets, map(len, read.targets))
            if max(ends, default=0) > slot.length:
                return ReadOutcome(MissReason.FOREIGN, detail="the slot is too short")
            starts = map(slot.offset.__add__, read.offsets)
            places = zip(repeat(handle), starts, read.targets, strict=False)
            slices += map(_slice_of, places)
        try:
            return source.peer.read(
                slices,
                timeout_s=timeout_s,
                priority=Priority.FOREGROUND,
                purpose=purpose,
                trace=recorded(TRACE.get()),
            )
        except TransferError as error:
            return _missed(error)


@dataclass(frozen=True, slots=True)
class _Started:
    """What reads the slots at ``places``, of ``counts[i]`` ranges each."""

    transfer: Transfer | ReadOutcome
    places: Sequence[int]
    counts: Sequence[int]

    def hand_out(
        self,
        result: TransferResult | ReadOutcome,
        found: list[TransferResult | ReadOutcome],
    ) -> None:
        """Give each slot what is its own."""
        if isinstance(result, ReadOutcome) or len(self.places) == 1:
            for place in self.places:
                found[place] = result
            return
        at = 0
        for place, count in zip(self.places, self.counts, strict=True):
            own = result.xxh3[at : at + count]
            found[place] = TransferResult(own, result.bytes, result.path)
            at += count


def _groups(
    reads: Sequence[SlotRead], sources: Mapping[NodeRef, _Source | ReadOutcome]
) -> Iterator[list[int]]:
    """Which reads go together: those of one store that are in memory we share."""
    shared = {
        owner
        for owner, source in sources.items()
        if isinstance(source, _Source) and source.peer.path == "shm"
    }
    group: list[int] = []
    owner: NodeRef | None = None
    nbytes = slices = 0
    for place, read in enumerate(reads):
        own_bytes = sum(map(len, read.targets))
        fits = (
            read.slot.owner == owner
            and owner in shared
            and nbytes + own_bytes <= GROUP_BYTES
            and slices + len(read.targets) <= GROUP_SLICES
        )
        if group and not fits:
            yield group
            group, nbytes, slices = [], 0, 0
        owner = read.slot.owner
        group.append(place)
        nbytes += own_bytes
        slices += len(read.targets)
    if group:
        yield group


async def _result(started: Transfer | ReadOutcome) -> TransferResult | ReadOutcome:
    if isinstance(started, ReadOutcome):
        return started
    try:
        return await started
    except TransferError as error:
        return _missed(error)


async def _abandon(started: Sequence[Transfer | ReadOutcome]) -> None:
    """Cancel, and wait until every target is the caller's again."""
    transfers = [each for each in started if isinstance(each, Transfer)]
    for transfer in transfers:
        transfer.cancel()
    for transfer in transfers:
        while not transfer.done():
            try:
                await transfer
            except (TransferError, asyncio.CancelledError):
                # a cancelled wait ends only when the memory is free
                continue


def _missed(error: TransferError) -> ReadOutcome:
    if isinstance(error, TimedOut):
        reason = MissReason.TIMED_OUT
    elif isinstance(error, StaleEpoch):
        reason = MissReason.STORE_GONE
    elif error.kind == "corrupt":
        reason = MissReason.CORRUPT
    else:
        reason = MissReason.UNREACHABLE
    return ReadOutcome(reason, detail=str(error))


def _facts(found: Sequence[TransferResult | ReadOutcome]) -> dict[str, Fact]:
    """What a trace says of a read."""
    good = [one for one in found if isinstance(one, TransferResult)]
    paths = sorted({one.path for one in good})
    return {
        "bytes": sum(one.bytes for one in good),
        "missed": len(found) - len(good),
        "path": ",".join(paths),
    }
