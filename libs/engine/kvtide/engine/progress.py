"""How long steps tell what they are doing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["download", "verify", "convert", "load", "wait"]


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One report of a long step.

    `done` of `total` in `unit`; a total of 0 means that it is not known.
    """

    stage: Stage
    done: int
    total: int
    unit: str
    message: str


Progress = Callable[[ProgressReport], None]
"""Called in the thread that does the work; must return quickly."""


def silent(_report: ProgressReport) -> None:
    """Report to nobody."""
