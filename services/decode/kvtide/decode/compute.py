"""One engine step of decode: feed every row, draw where a token is wanted.

Runs on the engine thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.decode.draws import Drawer, Wish
from kvtide.decode.events import Row, RowFailed, Sampled
from kvtide.engine.grammars import Grammars
from kvtide.engine.memory import KvRun
from kvtide.engine.runner import Chunk, Runner


@dataclass(frozen=True, slots=True)
class RowWork:
    """A row with the memory that it works on."""

    row: Row
    run: KvRun


def compute_step(
    runner: Runner,
    drawer: Drawer,
    rows: Sequence[RowWork],
    grammars: Grammars | None = None,
) -> tuple[tuple[Sampled, ...], tuple[RowFailed, ...]]:
    """Compute a step; the tokens of the rows that draw, and the rows that can't.

    A row whose logits are no numbers fails alone: rows do not see each other. What
    grammars allow is worked out meanwhile.

    Raises:
        EngineError: the engine refused the step.
    """
    chunks: list[Chunk] = []
    for work in rows:
        row = work.row
        work.run.length = row.start
        chunks.append(Chunk(work.run, row.tokens, row.start, row.sampling is not None))
        drawer.prepare(row, grammars)
    results = runner.step(chunks)
    wishes = [
        Wish(work.row, result)
        for work, result in zip(rows, results, strict=True)
        if result is not None
    ]
    return drawer.draw(wishes)
