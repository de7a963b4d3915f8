"""One engine step of decode: feed every row, draw where a token is wanted.

Runs on the engine thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvtide.decode.draws import Drawer, Wish
from kvtide.decode.events import Row, RowFailed, Sampled
from kvtide.engine.grammars import Grammars
from kvtide.engine.memory import KvRun
from kvtide.engine.runner import Chunk, Runner
from kvtide.worker.mixing import StepPart


@dataclass(frozen=True, slots=True)
class RowWork:
    """A row with the memory that it works on."""

    row: Row
    run: KvRun


Drawn = tuple[tuple[Sampled, ...], tuple[RowFailed, ...]]
"""The tokens of the rows that draw, and the rows that can't."""


def step_part(
    drawer: Drawer, rows: Sequence[RowWork], grammars: Grammars | None
) -> StepPart[Drawn]:
    """Decode's part of a step; see ``compute_step``."""

    def begin() -> list[Chunk]:
        chunks: list[Chunk] = []
        for work in rows:
            row, wanted = work.row, work.row.sampling is not None
            work.run.length = row.start
            chunks.append(Chunk(work.run, row.tokens, row.start, wanted))
            drawer.prepare(row, grammars)
        return chunks

    def finish(results: Sequence[Tensor | None]) -> Drawn:
        pairs = zip(rows, results, strict=True)
        return drawer.draw(
            [Wish(work.row, result) for work, result in pairs if result is not None]
        )

    return StepPart(begin, finish)


def compute_step(
    runner: Runner,
    drawer: Drawer,
    rows: Sequence[RowWork],
    grammars: Grammars | None = None,
) -> Drawn:
    """Compute a step; the tokens of the rows that draw, and the rows that can't.

    A row whose logits are no numbers fails alone: rows do not see each other. What
    grammars allow is worked out meanwhile.

    Raises:
        EngineError: the engine refused the step.
    """
    part = step_part(drawer, rows, grammars)
    return part.finish(runner.step(part.begin()))
