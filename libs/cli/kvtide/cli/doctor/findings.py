"""What a check says."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. ``FAIL``: kvtide, or what was asked for, will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``advice`` is empty when all is well."""

    subject: str
    level: Level
    text: str
    advice: str = ""
