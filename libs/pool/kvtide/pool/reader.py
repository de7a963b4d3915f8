"""Optimistic reads: copy one-sided, verify the private copy, call a mismatch a miss."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add

from kvtide.bus import Node
from kvtide.kv import NodeRef, SlotRef
from kvtide.pool.limits import PoolLimits
from kvtide.pool.outcomes import MissReason, ReadOutcome
from kvtide.transfer import (
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
        deadline_s = self._node.clock.monotonic() + timeout_s
        sources: dict[NodeRef, _Source | ReadOutcome] = {}
        for owner in dict.fromkeys(read.slot.owner for read in reads):
            sources[owner] = await self._source(owner, deadline_s)
        started: list[Transfer | ReadOutcome] = []
        try:
            for number, read in enumerate(reads):
                if number and number % STARTS_A_TURN == 0:
                    # hundreds of blocks must not hold up the loop
                    await self._node.clock.sleep(0)
                left_s = deadline_s - self._node.clock.monotonic()
                source = sources[read.slot.owner]
                started.append(self._start(read, source, left_s, purpose))
            return [await _result(each) for each in started]
        except BaseException:
            await _abandon(started)
            raise

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

    def _start(
        self,
        read: SlotRead,
        source: _Source | ReadOutcome,
        timeout_s: float,
        purpose: str,
    ) -> Transfer | ReadOutcome:
        if isinstance(source, ReadOutcome):
            return source
        if timeout_s <= 0:
            return ReadOutcome(MissReason.TIMED_OUT, detail="no time was left")
        slot = read.slot
        if not 0 <= slot.arena < len(source.arenas):
            return ReadOutcome(MissReason.STALE, detail="there is no such arena")
        handle = source.arenas[slot.arena]
        ends = map(add, read.offsets, map(len, read.targets))
        if max(ends, default=0) > slot.length:
            return ReadOutcome(MissReason.FOREIGN, detail="the slot is too short")
        starts = map(slot.offset.__add__, read.offsets)
        slices = list(map(ReadSlice, repeat(handle), starts, read.targets))
        priority = Priority.FOREGROUND
        try:
            return source.peer.read(
                slices, timeout_s=timeout_s, priority=priority, purpose=purpose
            )
        except TransferError as error:
            return _missed(error)


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
