"""From which copy each block of a chosen prefix is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

CopyT = TypeVar("CopyT")


@dataclass(frozen=True, slots=True)
class Option(Generic[CopyT]):
    """A copy on one host, and how long its link needs for it, relative to others."""

    host: int | str
    cost: float
    copy: CopyT


def spread(blocks: Sequence[Sequence[Option[CopyT]]]) -> tuple[CopyT, ...]:
    """One copy of each block, so that all hosts' links are done at about the same time.

    Each block goes to the host that would have it read first; of equals to the first.
    Every block needs at least one option.
    """
    used: dict[int | str, float] = {}
    chosen: list[CopyT] = []
    for options in blocks:
        best = min(options, key=lambda each: used.get(each.host, 0.0) + each.cost)
        used[best.host] = used.get(best.host, 0.0) + best.cost
        chosen.append(best.copy)
    return tuple(chosen)
