"""Choosing tokens from logits, in batches."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.engine.adjust import Mask, adjusted
from kvtide.engine.distribution import inverted, weights_of
from kvtide.engine.errors import NonFiniteLogits
from kvtide.engine.history import TokenHistory
from kvtide.engine.sampling import SamplingParams, uniform
from kvtide.engine.threads import one_thread

# numbers in a batch up to which one thread is as fast as all: 32 rows of 49,152
_SERIAL_NUMBERS = 3 << 19


@dataclass(frozen=True, slots=True)
class Draw:
    """What is wanted of one row of logits.

    Raises:
        ValueError: ``params`` penalise, and there is no history.

    Attributes:
        position: the index that the new token gets in its whole sequence, prompt and
            generated tokens together.
        banned: ids that can't be drawn, unless nothing else is left.
        history: needed where ``params`` penalise.
        mask: the ids that a grammar allows, packed as llguidance has them.
    """

    params: SamplingParams
    position: int
    banned: tuple[int, ...] = ()
    history: TokenHistory | None = None
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if self.params.penalises and self.history is None:
            raise ValueError("penalties need the sequence's history")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position: of the model's own logits, unchanged.

    `top_ids` and `top_logprobs` are the likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One row's token; its log-probabilities if they were asked for."""

    token: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Draws tokens; stateless, so any worker draws the same.

    A token is found by inverting the distribution over token ids with the uniform
    number of (seed, choice, position). Ids are in their natural order, so noise in the
    logits moves a token only where the number lies at an edge of the distribution.
    """

    @torch.inference_mode()
    def draw(
        self, logits: Tensor | Sequence[Tensor], draws: Sequence[Draw]
    ) -> list[Drawn]:
        """Draw one token for each row of logits [batch, vocab].

        Raises:
            NonFiniteLogits: a row holds NaN or infinity, or nothing but -infinity.
            ValueError: the two lengths differ.
        """
        rows = _rows(logits)
        if len(rows) != len(draws):
            raise ValueError(f"{len(rows)} rows, {len(draws)} draws")
        if not draws:
            return []
        _refuse_non_finite(rows)
        with _few_threads(rows):
            changed = adjusted(rows, draws)
            tokens = _chosen(changed, draws)
            reported = _reported(rows, tokens, draws)
        return [Drawn(token, reported.get(i)) for i, token in enumerate(tokens)]


def _chosen(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The likeliest tokens of greedy rows; the others' by their uniform numbers."""
    greedy = [i for i, draw in enumerate(draws) if draw.params.greedy]
    if len(greedy) == len(draws):
        return logits.argmax(-1).tolist()
    if not greedy:
        return _invert(logits, draws)
    tokens = [0] * len(draws)
    drawing = [i for i, draw in enumerate(draws) if not draw.params.greedy]
    for i, token in zip(greedy, logits[greedy].argmax(-1).tolist(), strict=True):
        tokens[i] = token
    drawn = _invert(logits[drawing], [draws[i] for i in drawing])
    for i, token in zip(drawing, drawn, strict=True):
        tokens[i] = token
    return tokens


def _invert(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Invert each row's distribution over ids at its position's uniform number."""
    params = [draw.params for draw in draws]
    numbers = [
        uniform(draw.params.seed, draw.params.choice, draw.position) for draw in draws
    ]
    return inverted(weights_of(logits, params), numbers)


def _reported(
    rows: Tensor, tokens: Sequence[int], draws: Sequence[Draw]
) -> dict[int, TokenLogprobs]:
    wanted = {
        i: draw.params.logprobs
        for i, draw in enumerate(draws)
        if draw.params.logprobs is not None
    }
    if not wanted:
        return {}
    places = list(wanted)
    every = torch.log_softmax(rows[places], -1)
    column = torch.tensor([[tokens[i]] for i in places], device=rows.device)
    own: list[float] = every.gather(1, column)[:, 0].tolist()
    values, ids = every.topk(min(max(wanted.values()), every.shape[-1]), -1)
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return {
        i: TokenLogprobs(tokens[i], mine, tuple(top[:n]), tuple(likely[:n]))
        for (i, n), mine, (top, likely) in zip(wanted.items(), own, tops, strict=True)
    }


def _few_threads(rows: Tensor) -> contextlib.AbstractContextManager[None]:
    if rows.device.type == "cpu" and rows.numel() <= _SERIAL_NUMBERS:
        return one_thread()
    return contextlib.nullcontext()


def _rows(logits: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(logits, Tensor):
        return logits
    return torch.stack(list(logits)) if logits else torch.empty(0, 0)


def _refuse_non_finite(rows: Tensor) -> None:
    finite = torch.isfinite(rows.amax(-1))
    if not bool(finite.all()):
        raise NonFiniteLogits(int(finite.logical_not().nonzero()[0]))
