"""One engine step of decode: feed every row, draw where a token is wanted.

Runs on the engine thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvtide.bus.messages import SamplingSpec
from kvtide.decode.events import Row, Sampled
from kvtide.engine.memory import KvRun
from kvtide.engine.runner import Chunk, Runner
from kvtide.engine.sampler import Sampler
from kvtide.engine.sampling import SamplingParams
from kvtide.kv import RequestRef

_BANNED_LOGIT = -1e30
"""Low enough never to be drawn, and finite: a sampler refuses what is not."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """A row with the memory that it works on."""

    row: Row
    run: KvRun


def params_of(spec: SamplingSpec) -> SamplingParams:
    """The engine's form of what a message asks for.

    Raises:
        InvalidSampling: a number is out of its range.
    """
    return SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        choice=spec.choice,
    )


def compute_step(
    runner: Runner, sampler: Sampler, rows: Sequence[RowWork]
) -> tuple[Sampled, ...]:
    """Compute a step; the tokens of the rows that draw.

    Raises:
        EngineError: the engine refused, or gave logits that are no numbers.
    """
    chunks: list[Chunk] = []
    for work in rows:
        row = work.row
        work.run.length = row.start
        chunks.append(Chunk(work.run, row.tokens, row.start, row.sampling is not None))
    results = runner.step(chunks)
    refs: list[RequestRef] = []
    logits: list[Tensor] = []
    params: list[SamplingParams] = []
    positions: list[int] = []
    for work, result in zip(rows, results, strict=True):
        spec = work.row.sampling
        if spec is None or result is None:
            continue
        refs.append(work.row.ref)
        logits.append(_without(result, work.row.banned))
        params.append(params_of(spec))
        positions.append(work.row.start + len(work.row.tokens))
    tokens = sampler.sample(logits, params, positions)
    return tuple(Sampled(ref, token) for ref, token in zip(refs, tokens, strict=True))


def _without(logits: Tensor, banned: tuple[int, ...]) -> Tensor:
    if not banned:
        return logits
    changed = logits.clone()
    changed[list(banned)] = _BANNED_LOGIT
    return changed
