"""One engine step of decode: feed every row, draw where a token is wanted.

Runs on the engine thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvtide.bus.messages import SamplingSpec
from kvtide.decode.events import Row, RowFailed, Sampled
from kvtide.engine.errors import NonFiniteLogits
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


@dataclass(slots=True)
class _Draws:
    """The rows that draw, side by side."""

    refs: list[RequestRef] = field(default_factory=list[RequestRef])
    logits: list[Tensor] = field(default_factory=list[Tensor])
    params: list[SamplingParams] = field(default_factory=list[SamplingParams])
    positions: list[int] = field(default_factory=list[int])

    def add(self, row: Row, spec: SamplingSpec, logits: Tensor) -> None:
        """One more row."""
        self.refs.append(row.ref)
        self.logits.append(_without(logits, row.banned))
        self.params.append(params_of(spec))
        self.positions.append(row.start + len(row.tokens))

    def drop(self, index: int) -> RequestRef:
        """One row less: whose it was."""
        for column in (self.logits, self.params, self.positions):
            del column[index]
        return self.refs.pop(index)


def compute_step(
    runner: Runner, sampler: Sampler, rows: Sequence[RowWork]
) -> tuple[tuple[Sampled, ...], tuple[RowFailed, ...]]:
    """Compute a step; the tokens of the rows that draw, and the rows that can't.

    A row whose logits are no numbers fails alone: rows do not see each other.

    Raises:
        EngineError: the engine refused the step.
    """
    chunks: list[Chunk] = []
    for work in rows:
        row = work.row
        work.run.length = row.start
        chunks.append(Chunk(work.run, row.tokens, row.start, row.sampling is not None))
    results = runner.step(chunks)
    draws = _Draws()
    for work, result in zip(rows, results, strict=True):
        spec = work.row.sampling
        if spec is not None and result is not None:
            draws.add(work.row, spec, result)
    return _drawn(sampler, draws)


def _drawn(
    sampler: Sampler, draws: _Draws
) -> tuple[tuple[Sampled, ...], tuple[RowFailed, ...]]:
    failed: list[RowFailed] = []
    while True:
        try:
            tokens = sampler.sample(draws.logits, draws.params, draws.positions)
        except NonFiniteLogits as error:
            failed.append(RowFailed(draws.drop(error.row), str(error)))
        else:
            pairs = zip(draws.refs, tokens, strict=True)
            return tuple(Sampled(ref, token) for ref, token in pairs), tuple(failed)


def _without(logits: Tensor, banned: tuple[int, ...]) -> Tensor:
    if not banned:
        return logits
    changed = logits.clone()
    changed[list(banned)] = _BANNED_LOGIT
    return changed
