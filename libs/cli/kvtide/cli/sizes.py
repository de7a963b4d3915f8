"""Bytes for people."""

import re

from kvtide.runtime import ConfigError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def size(count: float) -> str:
    """``1.5 GiB``."""
    for unit in _UNITS[:-1]:
        if abs(count) < _STEP:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return f"{count:.1f} {_UNITS[-1]}"


def parse_size(text: str) -> int:
    """Bytes of ``65536``, ``64KiB`` or ``1 MiB``.

    Raises:
        ConfigError: it is none of these.
    """
    found = re.fullmatch(r"(\d+)\s*(|B|KiB|MiB|GiB|TiB)", text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no size such as 64KiB or 1MiB", key="size")
    number, unit = found.groups()
    return int(number) * int(_STEP ** _UNITS.index(unit or "B"))
