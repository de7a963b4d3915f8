"""A reused prefix, read layer by layer, so that a step can follow behind."""

from collections.abc import Callable, Sequence

import structlog

from kvtide.kv import Located
from kvtide.pool import PoolClient
from kvtide.prefill import events
from kvtide.prefill.gate import LoadGate
from kvtide.runtime import Clock
from kvtide.worker.service import OpenRun

READ_BYTES = 8 << 20
"""About so much is read at a time: of a short prefix several layers."""

log = structlog.get_logger("kvtide.prefill")


class LayeredLoad:
    """One load, into memory of a run that lives until it has ended."""

    def __init__(
        self,
        pool: PoolClient,
        held: OpenRun,
        load: events.Load,
        gate: LoadGate,
        clock: Clock,
    ) -> None:
        """Read with ``run``."""
        self._pool = pool
        self._held = held
        self._load = load
        self._gate = gate
        self._clock = clock
        self._sinks = [held.sink(load.first + i) for i in range(len(load.copies))]

    async def run(
        self, *, timeout_s: float, checked: Callable[[events.Event], object]
    ) -> events.Loaded:
        """Read; ``checked`` is told as soon as the headers are known to be right.

        What ends it, says how many of the blocks are there in every layer.
        """
        load, layout = self._load, self._held.space.layout
        begin_s = self._clock.monotonic()
        blocks = await self._staged_by_layer(begin_s + timeout_s, checked)
        if blocks is None:
            every = range(layout.parts)
            left_s = begin_s + timeout_s - self._clock.monotonic()
            blocks = await self._read(load.copies, every, left_s)
            self._gate.ended(whole=blocks == len(load.copies) or not load.promised)
        if blocks < len(load.copies):
            log.info(
                "reuse missed",
                request=load.ref.request,
                blocks=len(load.copies) - blocks,
            )
        ms = (self._clock.monotonic() - begin_s) * 1000
        size = blocks * layout.slot_bytes
        whole = blocks == len(load.copies)
        return events.Loaded(load.ref, blocks, size, ms, load.first, whole)

    async def _staged_by_layer(
        self, until_s: float, checked: Callable[[events.Event], object]
    ) -> int | None:
        """Have what is on an SSD in memory once, for the reads of all layers.

        None: there was no room for all of it at once; it is to be read block by block.
        """
        left_s = until_s - self._clock.monotonic()
        async with self._pool.staged(self._load.copies, timeout_s=left_s) as there:
            copies = [copy for copy in there if copy is not None]
            if len(copies) < len(there):
                return None
            return await self._by_layer(copies, until_s, checked)

    async def _by_layer(
        self,
        copies: Sequence[Located],
        until_s: float,
        checked: Callable[[events.Event], object],
    ) -> int:
        """Check the headers, then read; how many blocks are there in every layer."""
        load, layout = self._load, self._held.space.layout
        headers = await self._pool.read_headers(
            copies,
            self._held.space.tags,
            layout,
            timeout_s=max(0.0, until_s - self._clock.monotonic()),
        )
        blocks = next(
            (i for i, header in enumerate(headers) if header is None), len(headers)
        )
        promised = len(headers) if load.promised else blocks
        if blocks < promised:
            # a step that waits for all of them must not go on without
            self._gate.ended(whole=False)
        if blocks:
            checked(events.Checked(load.ref, load.first, blocks))
        layers = layout.parts // 2
        layer_bytes = max(1, blocks * 2 * layout.part_bytes)
        at_once = max(1, min(layers, READ_BYTES // layer_bytes))
        layer = 0
        while layer < layers and blocks:
            left_s = until_s - self._clock.monotonic()
            end = min(layers, layer + at_once)
            parts = range(2 * layer, 2 * end)
            good = await self._read(copies[:blocks], parts, left_s)
            if good < blocks:
                blocks = good
                self._gate.ended(whole=False)
            layer = end
            self._gate.reached(layer)
        self._gate.ended(whole=blocks == promised)
        return blocks

    async def _read(
        self, copies: Sequence[Located], parts: range, timeout_s: float
    ) -> int:
        """Read these parts of the copies; how many, from the first on, have them."""
        outcomes = await self._pool.read_blocks(
            copies,
            self._held.space.tags,
            self._held.space.layout,
            self._sinks[: len(copies)],
            timeout_s=max(0.0, timeout_s),
            purpose="reuse",
            parts=parts,
        )
        return next((i for i, one in enumerate(outcomes) if not one.ok), len(copies))
