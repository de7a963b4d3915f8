"""What decode asks of others: prefill's state, blocks and parts, room in the pool.

Each operation ends with the event that the machine waits for. One that raises what
nobody foresaw is ended by the shell, with ``failed_end``.
"""

import structlog

from kvtide.bus.messages import (
    PutBlock,
)
from kvtide.decode import events
from kvtide.decode.events import BlockCopy, LayerPart
from kvtide.decode.metrics import DecodeMetrics
from kvtide.decode.settings import DecodeSettings
from kvtide.engine.errors import EngineError
from kvtide.engine.memory import KEY, VALUE
from kvtide.kv import Lease
from kvtide.pool import PartRead, PoolError, Put
from kvtide.worker.service import Chassis, OpenRun

PUT_LANE = "put"

log = structlog.get_logger("kvtide.decode")


class Operations:
    """The operations of one decode worker."""

    def __init__(
        self, chassis: Chassis, settings: DecodeSettings, metrics: DecodeMetrics
    ) -> None:
        """None of these is owned."""
        self._node = chassis.node
        self._engine = chassis.engine
        self._pool = chassis.pool
        self._settings = settings
        self._metrics = metrics

    async def find_copies(self, held: OpenRun, find: events.FindCopies) -> events.Event:
        """Ask the store on this host for slots: it answers with what it has."""
        size, ref = held.space.layout.block_tokens, find.ref
        lease = Lease(ref.request, ref.attempt, self._node.ref)
        wanted = [PutBlock(one.key, size) for one in find.blocks]
        try:
            put = await self._pool.begin(
                lease, held.space.tags, held.space.layout, wanted
            )
        except PoolError as error:
            log.debug("nothing found", request=ref.request, reason=str(error))
            return events.CopiesFound(ref, ())
        copies = tuple(
            BlockCopy(one.block, slot.existing)
            for one, slot in zip(find.blocks, put.slots, strict=True)
            if slot.existing is not None
        )
        await put.release()
        return events.CopiesFound(ref, copies)

    async def read_copies(self, held: OpenRun, read: events.ReadCopies) -> events.Event:
        """Read whole blocks from the pool."""
        outcomes = await self._pool.read_blocks(
            [copy.located for copy in read.copies],
            held.space.tags,
            held.space.layout,
            [held.sink(copy.block) for copy in read.copies],
            timeout_s=self._settings.read_timeout_s,
            purpose="reuse",
        )
        good = tuple(
            copy.block
            for copy, outcome in zip(read.copies, outcomes, strict=True)
            if outcome.ok
        )
        missed = tuple(copy.block for copy in read.copies if copy.block not in good)
        self._metrics.read("block", read=len(good), missed=len(missed))
        if missed:
            reasons = {str(outcome.miss) for outcome in outcomes if not outcome.ok}
            log.info(
                "reuse missed",
                request=read.ref.request,
                blocks=len(missed),
                reasons=sorted(reasons),
            )
        return events.CopiesRead(read.ref, good, missed)

    async def read_parts(self, held: OpenRun, read: events.ReadParts) -> events.Event:
        """Read parts from prefill's slots."""
        size = held.space.layout.block_tokens
        reads: list[PartRead] = []
        for part in read.parts:
            sums, start = part.sums, part.sums.block * size
            end = start + part.tokens
            for kind, xxh3 in ((KEY, sums.k_xxh3), (VALUE, sums.v_xxh3)):
                into = held.run.part(sums.layer, kind, start, end)
                number = 2 * sums.layer + kind
                reads.append(PartRead(part.slot, number, xxh3, into))
        outcomes = await self._pool.read_parts(
            reads, held.space.layout, timeout_s=self._settings.read_timeout_s
        )
        good: list[LayerPart] = []
        missed: list[LayerPart] = []
        pairs = zip(outcomes[::2], outcomes[1::2], strict=True)
        for part, (k_read, v_read) in zip(read.parts, pairs, strict=True):
            both = k_read.ok and v_read.ok
            one = LayerPart(part.sums.block, part.sums.layer)
            (good if both else missed).append(one)
        self._metrics.read("part", read=len(good), missed=len(missed))
        if missed:
            reasons = {str(outcome.miss) for outcome in outcomes if not outcome.ok}
            log.info(
                "hand-over missed",
                request=read.ref.request,
                parts=len(missed),
                reasons=sorted(reasons),
            )
        return events.PartsRead(read.ref, tuple(good), tuple(missed))

    async def put_blocks(self, held: OpenRun, put: events.PutBlocks) -> events.Event:
        """Offer generated blocks to the pool; if it will not have them, so be it."""
        size = held.space.layout.block_tokens
        ref = put.ref
        lease = Lease(ref.request, ref.attempt, self._node.ref)
        wanted = [PutBlock(one.key, size) for one in put.blocks]
        try:
            granted = await self._pool.begin(
                lease, held.space.tags, held.space.layout, wanted
            )
        except PoolError as error:
            log.debug("not pooled", request=ref.request, reason=str(error))
            self._metrics.put("refused")
            return events.BlocksPut(ref)
        try:
            await self._engine.run(PUT_LANE, lambda: _write(held, put, granted))
            for state in await granted.commit():
                self._metrics.put(str(state) if state else "not written")
        except (PoolError, EngineError) as error:
            log.debug("not pooled", request=ref.request, reason=str(error))
            self._metrics.put("failed")
        finally:
            await granted.release()
        return events.BlocksPut(ref)


def _write(held: OpenRun, put: events.PutBlocks, granted: Put) -> None:
    layout = held.space.layout
    for index, one in enumerate(put.blocks):
        if not granted.writable(index):
            continue
        part = held.sink(one.block)
        granted.write_parts(index, 0, list(map(part, range(layout.parts))))
