"""What a check says."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtide.transfer.topology import Near


class Level(StrEnum):
    """How bad it is. ``FAIL``: kvtide, or what was asked for, will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``advice`` is empty when all is well.

    ``matrix`` is what the text says for machines, where there is more to it.
    """

    subject: str
    level: Level
    text: str
    advice: str = ""
    matrix: Mapping[str, Near] | None = None
