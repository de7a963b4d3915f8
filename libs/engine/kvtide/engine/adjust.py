"""What changes logits before a token is drawn: grammar, bans, biases, penalties."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.engine.history import TokenHistory
from kvtide.engine.sampling import SamplingParams

Mask = NDArray[np.int32]
"""One bit for each token id, lowest bit first: whether it is allowed."""

_HIDDEN = float("-inf")


class Wanted(Protocol):
    """What a row's changes are made from; see `kvtide.engine.sampler.Draw`."""

    @property
    def params(self) -> SamplingParams:
        """How to choose."""
        ...

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that can't be drawn."""
        ...

    @property
    def history(self) -> TokenHistory | None:
        """The sequence's tokens."""
        ...

    @property
    def mask(self) -> Mask | None:
        """What a grammar allows."""
        ...


def adjusted(rows: Tensor, draws: Sequence[Wanted]) -> Tensor:
    """The logits [batch, vocab] that tokens are drawn from; `rows` stay as they are.

    Where nothing is to be changed these are `rows` themselves.
    """
    changing = any(
        draw.banned or draw.mask is not None or draw.params.logit_bias
        or draw.params.penalises
        for draw in draws
    )  # fmt: skip
    if not changing:
        return rows
    changed = rows.clone()
    for row, draw in zip(changed, draws, strict=True):
        if draw.mask is not None:
            row.masked_fill_(_forbidden(draw.mask, row), _HIDDEN)
        if draw.banned:
            _ban(row, draw.banned)
    _bias(changed, draws)
    _penalise(changed, draws)
    return changed


def _forbidden(mask: Mask, row: Tensor) -> Tensor:
    """Bool [vocab]; ids behind the mask's end are forbidden too."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=None)
    allowed = np.zeros(len(row), np.bool_)
    size = min(len(row), len(bits))
    allowed[:size] = bits[:size]
    return torch.from_numpy(np.logical_not(allowed)).to(row.device)


def _ban(row: Tensor, banned: tuple[int, ...]) -> None:
    ids = list(banned)
    before = row[ids]
    row[ids] = _HIDDEN
    if bool(torch.isneginf(row.amax())):  # a grammar allows nothing else
        row[ids] = before


def _bias(rows: Tensor, draws: Sequence[Wanted]) -> None:
    vocab = rows.shape[-1]
    places: list[int] = []
    values: list[float] = []
    for number, draw in enumerate(draws):
        for token, value in draw.params.logit_bias:
            places.append(number * vocab + token)
            values.append(value)
    if places:
        at = torch.tensor(places, device=rows.device)
        rows.view(-1).index_add_(0, at, torch.tensor(values, device=rows.device))


def _penalise(rows: Tensor, draws: Sequence[Wanted]) -> None:
    """All rows in one gather and one scatter."""
    places: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.float32]] = []
    factors: list[NDArray[np.float32]] = []
    for number, draw in enumerate(draws):
        params, history = draw.params, draw.history
        if not params.penalises or history is None:
            continue
        places.append(history.ids + number * rows.shape[-1])
        counts.append(history.counts)
        three = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        column = np.array(three, np.float32)[:, None]
        factors.append(np.broadcast_to(column, (3, len(history.ids))))
    if not places:
        return
    flat, device = rows.view(-1), rows.device
    at = torch.from_numpy(np.concatenate(places)).to(device)
    count = torch.from_numpy(np.concatenate(counts)).to(device)
    factor = torch.from_numpy(np.concatenate(factors, 1)).to(device)
    repetition, frequency, presence = factor
    logits = flat[at]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    flat[at] = logits - frequency * count - presence * (count > 0)
