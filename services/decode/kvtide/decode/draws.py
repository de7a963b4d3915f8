"""Draws tokens for rows, and remembers between steps what that takes.

Runs on the engine thread.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from kvtide.bus.messages import SamplingSpec, TokenLogprobs
from kvtide.decode.events import Row, RowFailed, Sampled
from kvtide.engine import sampler as engine
from kvtide.engine.errors import GrammarFailed, NonFiniteLogits, UnsupportedModel
from kvtide.engine.grammar import Grammar, GrammarKind
from kvtide.engine.grammars import Grammars, GrammarState
from kvtide.engine.history import TokenHistory
from kvtide.engine.sampling import SamplingParams
from kvtide.kv import RequestRef

REMEMBERED: Final = 1024
"""Requests whose state is kept; that of any other is made again from its row."""


def params_of(spec: SamplingSpec) -> SamplingParams:
    """The engine's form of what a message asks for.

    Raises:
        InvalidSampling: a number is out of its range.
    """
    grammar = spec.grammar
    return SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        choice=spec.choice,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        logit_bias=spec.logit_bias,
        logprobs=spec.logprobs,
        grammar=grammar and Grammar(GrammarKind(grammar.language), grammar.source),
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """A row with the logits that its token is drawn from."""

    row: Row
    logits: Tensor


@dataclass(slots=True)
class _State:
    """What is remembered of a request; all of it follows from any of its rows."""

    params: SamplingParams
    history: TokenHistory | None = None
    grammar: GrammarState | None = None


class Drawer:
    """Makes each row's draw. Call ``prepare`` for all rows of a step, then ``draw``."""

    def __init__(self) -> None:
        """Nothing is remembered."""
        self._sampler = engine.Sampler()
        self._states: OrderedDict[RequestRef, _State] = OrderedDict()

    def prepare(self, row: Row, grammars: Grammars | None) -> None:
        """Begin with what the row's draw takes besides logits."""
        if row.sampling is None:
            return
        state = self._state(row, row.sampling)
        context = row.context
        if context is None:
            return
        grammar = state.params.grammar
        if grammar is not None and grammars is not None:
            if state.grammar is None:
                state.grammar = grammars.state(grammar)
            state.grammar.prepare(context.answer)
        if state.params.penalises:
            if state.history is None:
                state.history = TokenHistory(context.prompt)
            state.history.follow(context.answer)

    def draw(
        self, wishes: Sequence[Wish]
    ) -> tuple[tuple[Sampled, ...], tuple[RowFailed, ...]]:
        """The rows' tokens, and the rows that can't have one."""
        failed: list[RowFailed] = []
        refs: list[RequestRef] = []
        logits: list[Tensor] = []
        draws: list[engine.Draw] = []
        for wish in wishes:
            try:
                draws.append(self._draw_of(wish.row))
            except (GrammarFailed, UnsupportedModel) as error:
                failed.append(RowFailed(wish.row.ref, str(error)))
                continue
            refs.append(wish.row.ref)
            logits.append(wish.logits)
        while True:
            try:
                drawn = self._sampler.draw(logits, draws)
            except NonFiniteLogits as error:
                failed.append(RowFailed(refs.pop(error.row), str(error)))
                del logits[error.row], draws[error.row]
            else:
                pairs = zip(refs, drawn, strict=True)
                return tuple(_sampled(ref, one) for ref, one in pairs), tuple(failed)

    def _draw_of(self, row: Row) -> engine.Draw:
        state = self._states[row.ref]
        if state.params.grammar is not None and state.grammar is None:
            raise GrammarFailed("this worker has no vocabulary to hold answers with")
        return engine.Draw(
            state.params,
            row.start + len(row.tokens),
            row.banned,
            state.history,
            state.grammar.mask() if state.grammar is not None else None,
        )

    def _state(self, row: Row, sampling: SamplingSpec) -> _State:
        state = self._states.get(row.ref)
        if state is None:
            state = self._states[row.ref] = _State(params_of(sampling))
            if len(self._states) > REMEMBERED:
                self._states.popitem(last=False)
        self._states.move_to_end(row.ref)
        return state


def _sampled(ref: RequestRef, drawn: engine.Drawn) -> Sampled:
    told = drawn.logprobs
    if told is None:
        return Sampled(ref, drawn.token)
    top = tuple(zip(told.top_ids, told.top_logprobs, strict=True))
    return Sampled(ref, drawn.token, TokenLogprobs(told.logprob, top))
