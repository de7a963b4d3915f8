"""One engine step of prefill: compute chunks, put each layer's parts as it is made.

Runs on the engine thread.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtide.bus.messages import PartSums
from kvtide.engine.memory import KEY, VALUE, KvRun
from kvtide.engine.runner import Chunk
from kvtide.kv import Layout, PartKind, RequestRef
from kvtide.pool import Put
from kvtide.prefill.events import ChunkSpec
from kvtide.prefill.gate import LoadGate
from kvtide.worker.mixing import StepPart

Announce = Callable[[RequestRef, tuple[PartSums, ...]], None]
"""Called on the engine thread when parts are in their slots."""


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """A chunk with what it works on.

    ``gates`` are of the loads that it depends on. ``written`` are (block, layer) pairs
    that are in their slots; a chunk that is computed again writes only the others.
    """

    spec: ChunkSpec
    tokens: Sequence[int]
    run: KvRun
    put: Put | None
    gates: Sequence[LoadGate] = ()
    written: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])


class StepCompute:
    """A step; call it once, on the engine thread. ``abort`` from any thread."""

    def __init__(
        self,
        chunks: Sequence[ChunkWork],
        layout: Layout,
        announce: Announce,
        count_step: Callable[[], None],
        contended: Callable[[], bool],
    ) -> None:
        """``count_step`` is called after each layer: a long step is no hung one.

        While the engine is ``contended`` no load is waited for.
        """
        self._chunks = chunks
        self._layout = layout
        self._announce = announce
        self._count_step = count_step
        self._contended = contended
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Stop between two layers."""
        self._aborted.set()

    def part(self) -> StepPart[None]:
        """What is to be computed.

        It raises ``StepCancelled`` if it was aborted, ``LoadFellShort`` if a prefix that
        it needs did not come, ``PutClosed`` if the slots are no longer this worker's.
        """
        return StepPart(
            begin=self._begin,
            finish=lambda _: None,
            on_layer=self._layer_made,
            cancelled=self._aborted.is_set,
            alone=any(chunk.gates for chunk in self._chunks),
        )

    def _begin(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for chunk in self._chunks:
            spec = chunk.spec
            chunk.run.length = spec.start
            tokens = chunk.tokens[spec.start : spec.end]
            chunks.append(Chunk(chunk.run, tokens, spec.start))
        return chunks

    def _layer_made(self, layer: int) -> None:
        for chunk in self._chunks:
            for gate in chunk.gates:
                gate.wait(layer, self._in_vain)
            parts = self._write(chunk, layer)
            if parts:
                self._announce(chunk.spec.ref, parts)
        self._count_step()

    def _in_vain(self) -> bool:
        return self._aborted.is_set() or self._contended()

    def _write(self, chunk: ChunkWork, layer: int) -> tuple[PartSums, ...]:
        put, layout = chunk.put, self._layout
        if put is None:
            return ()
        written: list[PartSums] = []
        for filled in chunk.spec.filled:
            if (filled.block, layer) in chunk.written:
                continue
            start = filled.block * layout.block_tokens
            end = start + filled.tokens
            k_part = chunk.run.part(layer, KEY, start, end)
            v_part = chunk.run.part(layer, VALUE, start, end)
            written.append(
                PartSums(
                    filled.block,
                    layer,
                    put.write_part(
                        filled.put, layout.part_index(layer, PartKind.K), k_part
                    ),
                    put.write_part(
                        filled.put, layout.part_index(layer, PartKind.V), v_part
                    ),
                )
            )
            chunk.written.add((filled.block, layer))
        return tuple(written)
