"""Fetches copies from other stores, in the background: reads, checks, and a slot filled.

The bytes are checked in private memory and then copied into the slot, so that a store
which begins a new life in between never has a read under way into its arena.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from xxhash import xxh3_64_intdigest

from kvtide.bus import BusError, Node
from kvtide.bus.messages import BadCopy
from kvtide.bus.subjects import Hop
from kvtide.kv import Located, Role, SlotRef, Tier, renewed_header
from kvtide.pool import Stager
from kvtide.runtime import LimitError
from kvtide.store.fetches import (
    HEADER_LIMIT_BYTES,
    ArrivalCommand,
    BodyFetched,
    CorruptSource,
    FetchBody,
    FetchHeader,
    HeaderFetched,
    SourceGone,
    announced_header,
    check_sums,
    part_bounds,
)
from kvtide.transfer import Priority, ReadSlice, TransferError, TransferResult

log = structlog.get_logger("kvtide.store")

PURPOSE = "replica"
CONNECT_TIMEOUT_S = 3.0
STAGED = 2
STAGE_S = 2.0
STAGE_PAUSE_S = 0.1
COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FetchTimes:
    """Seconds. A body gets ``timeout_s`` and what it needs at ``least_bytes_per_s``."""

    timeout_s: float = 10.0
    least_bytes_per_s: float = 4e6


class Fetcher:
    """Obeys the machine's fetch commands; one life of a store."""

    def __init__(
        self,
        node: Node,
        arena: memoryview,
        stager: Stager,
        alive: Callable[[], bool],
        times: FetchTimes | None = None,
    ) -> None:
        """``alive`` says whether the life that asks is still the store's."""
        self._node = node
        self._arena = arena
        self._stager = stager
        self._staging = asyncio.Semaphore(STAGED)
        self._alive = alive
        self._times = times or FetchTimes()

    async def fetch(self, command: ArrivalCommand) -> HeaderFetched | BodyFetched:
        """Do what is asked; never raises for a source."""
        match command:
            case FetchHeader(number, source):
                try:
                    raw = await self._header(source)
                except (CorruptSource, SourceGone) as error:
                    corrupt = await self._failed(source, error)
                    return HeaderFetched(number, None, corrupt)
                return HeaderFetched(number, raw)
            case FetchBody():
                try:
                    header_xxh3 = await self._body(command)
                except (CorruptSource, SourceGone) as error:
                    corrupt = await self._failed(command.source, error)
                    return BodyFetched(command.number, None, corrupt)
                return BodyFetched(command.number, header_xxh3)

    async def _failed(self, source: Located, error: Exception) -> bool:
        """Say what was wrong; a corrupt copy is reported to its store."""
        corrupt = isinstance(error, CorruptSource)
        log.info(
            "replica_failed",
            source=source.slot.node,
            key=source.key.hex(),
            corrupt=corrupt,
            reason=str(error),
        )
        if corrupt:
            subject = self._node.subjects.inbox(Role.STORE, source.slot.node, Hop.QUERY)
            try:
                report = BadCopy(located=source, reason=str(error))
                await self._node.bus.publish(subject, report)
            except (BusError, LimitError) as lost:
                log.debug("bad_copy_not_reported", error=str(lost))
        return corrupt

    @asynccontextmanager
    async def _readable(self, source: Located) -> AsyncGenerator[Located]:
        """Where the copy can be read: one on SSD is staged by its store meanwhile.

        A store stages few blocks at a time, and readers come first: so ask for few, and
        again.
        """
        if source.slot.tier is Tier.DRAM:
            yield source
            return
        clock = self._node.clock
        until_s = clock.monotonic() + self._times.timeout_s
        async with self._staging:
            while True:
                async with self._stager.staged([source], timeout_s=STAGE_S) as (there,):
                    if there is not None:
                        yield there
                        return
                if clock.monotonic() >= until_s:
                    raise SourceGone("its store did not stage it")
                await clock.sleep(STAGE_PAUSE_S)

    async def _header(self, source: Located) -> bytes:
        """The whole header, as announced."""
        async with self._readable(source) as there:
            return await self._header_at(there)

    async def _header_at(self, there: Located) -> bytes:
        buffer = bytearray(min(there.slot.length, HEADER_LIMIT_BYTES))
        await self._read(there.slot, [(0, memoryview(buffer))])
        return announced_header(buffer, there)

    async def _body(self, asked: FetchBody) -> int:
        """All parts, compared with the header, then header and parts into the slot."""
        async with self._readable(asked.source) as there:
            # a copy that was staged has a header of its own
            raw = asked.raw if there == asked.source else await self._header_at(there)
            if (
                len(raw) != len(asked.raw)
                or there.slot.length != asked.source.slot.length
            ):
                raise CorruptSource("the staged copy is another block")
            bounds = part_bounds(raw)
            view = memoryview(bytearray(bounds[-1][1]))
            ranges = [(at, view[at:upto]) for at, upto in bounds]
            result = await self._read(there.slot, ranges)
        check_sums(raw, result.xxh3)
        own = renewed_header(raw, asked.generation)
        view[: len(own)] = own
        await self._fill(view, asked.offset)
        return xxh3_64_intdigest(own)

    async def _fill(self, block: memoryview, offset: int) -> None:
        """Copy into the slot, a piece at a time, for as long as it is ours."""
        for at in range(0, len(block), COPY_BYTES):
            if not self._alive():
                raise SourceGone("the store began a new life")
            piece = block[at : at + COPY_BYTES]
            self._arena[offset + at : offset + at + len(piece)] = piece
            await self._node.clock.sleep(0)

    async def _read(
        self, slot: SlotRef, ranges: list[tuple[int, memoryview]]
    ) -> TransferResult:
        node = self._node
        member = node.roster.get(slot.node)
        if member is None or member.ref != slot.owner or member.beat.transfer is None:
            raise SourceGone(f"{slot.node} is gone")
        if not 0 <= slot.arena < len(member.beat.arenas):
            raise SourceGone("there is no such arena")
        handle = member.beat.arenas[slot.arena]
        wanted = sum(len(into) for _, into in ranges)
        timeout_s = self._times.timeout_s + wanted / self._times.least_bytes_per_s
        slices = [ReadSlice(handle, slot.offset + at, into) for at, into in ranges]
        try:
            peer = await node.endpoint.connect(
                member.beat.transfer, timeout_s=CONNECT_TIMEOUT_S
            )
            return await peer.read(
                slices,
                timeout_s=timeout_s,
                priority=Priority.BACKGROUND,
                purpose=PURPOSE,
            )
        except TransferError as error:
            if error.kind == "corrupt":
                raise CorruptSource(str(error)) from error
            raise SourceGone(str(error)) from error
