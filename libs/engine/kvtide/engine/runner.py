"""Steps: mixed batches of prefill chunks and single decode tokens."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.engine.decoder import Decoder, Span
from kvtide.engine.errors import InvalidStep, RunClosed, RunFull, StepCancelled
from kvtide.engine.facts import ModelFacts
from kvtide.engine.memory import KvRun


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to be computed in a step.

    They stand at positions start, start + 1, … and attend to the run's tokens before
    them and to themselves. One token is a decode step.
    """

    run: KvRun
    tokens: Sequence[int]
    start: int
    want_logits: bool = False


class Runner:
    """Computes steps, one at a time.

    Call it from one thread of its own: each calling thread gets its own pool of compute
    threads. The interpreter lock is free during matrix products.
    """

    def __init__(self, decoder: Decoder, facts: ModelFacts) -> None:
        self._decoder = decoder
        self._facts = facts
        self._running = threading.Lock()

    @torch.inference_mode()
    def step(
        self,
        chunks: Sequence[Chunk],
        on_layer: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Tensor | None]:
        """Compute chunks of different runs; return logits for those that want them.

        Logits are float32 [vocab], for the chunk's last token. Afterwards each run's
        length is the chunk's end: a chunk that starts below the length replaces what
        followed.

        `on_layer(layer)` is called for each layer, in order, when the layer's new K and
        V of all chunks are in the runs and before its attention reads them. It may copy
        them out, and it may wait there until the layer's reused prefix has been read
        into the runs. `cancelled()` is asked before each layer.

        Raises:
            InvalidStep: a chunk is empty, starts behind its run's length, is longer
                than the model allows, has a token that the model lacks, two chunks
                share a run, or a step is already running. No run was changed.
            RunFull: a chunk ends behind its run's capacity. No run was changed.
            RunClosed: a run was closed before the step, or during it.
            StepCancelled: `cancelled()` was true. This and whatever `on_layer` raises
                leaves each run valid up to its chunk's start.
        """
        if not self._running.acquire(blocking=False):
            raise InvalidStep("a step is already running; a runner does one at a time")
        try:
            for chunk in chunks:
                self._check(chunk)
            if len({id(chunk.run) for chunk in chunks}) != len(chunks):
                raise InvalidStep("two chunks of a step share a run")
            return self._compute(chunks, on_layer, cancelled) if chunks else []
        finally:
            self._running.release()

    def _check(self, chunk: Chunk) -> None:
        end = chunk.start + len(chunk.tokens)
        if chunk.run.closed:
            raise RunClosed("a chunk's run is closed")
        if not chunk.tokens:
            raise InvalidStep("a chunk has no tokens")
        if not 0 <= chunk.start <= chunk.run.length:
            message = f"a chunk starts at {chunk.start}, its run holds"
            raise InvalidStep(f"{message} {chunk.run.length} tokens")
        if end > chunk.run.capacity:
            raise RunFull(end, chunk.run.capacity)
        if end > self._facts.max_tokens:
            message = f"a chunk ends at token {end}, the model's longest sequence has"
            raise InvalidStep(f"{message} {self._facts.max_tokens}")
        if min(chunk.tokens) < 0 or max(chunk.tokens) >= self._facts.vocab_size:
            message = "a token id is not within the vocabulary, 0 to"
            raise InvalidStep(f"{message} {self._facts.vocab_size - 1}")

    def _compute(
        self,
        chunks: Sequence[Chunk],
        on_layer: Callable[[int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> list[Tensor | None]:
        def between(_layer: int) -> None:
            if cancelled is not None and cancelled():
                raise StepCancelled("the step was cancelled between two layers")

        def written(layer: int) -> None:
            if on_layer is not None:
                on_layer(layer)

        tokens: list[int] = []
        spans: list[Span] = []
        for chunk in chunks:
            spans.append(
                self._decoder.span(
                    chunk.run, len(tokens), chunk.start, len(chunk.tokens)
                )
            )
            tokens.extend(chunk.tokens)
            # whatever happens from here on, tokens from start on are being replaced
            chunk.run.length = chunk.start
        wanted = [i for i, chunk in enumerate(chunks) if chunk.want_logits]
        logits = self._decoder.forward(tokens, spans, wanted, between, written)
        for chunk, span in zip(chunks, spans, strict=True):
            if not chunk.run.closed:
                chunk.run.length = span.end
        results: list[Tensor | None] = [None] * len(chunks)
        if logits is not None:
            for row, index in enumerate(wanted):
                results[index] = logits[row]
        return results
