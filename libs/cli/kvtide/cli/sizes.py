"""Bytes for people."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def size(count: float) -> str:
    """``1.5 GiB``."""
    for unit in _UNITS[:-1]:
        if abs(count) < _STEP:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return f"{count:.1f} {_UNITS[-1]}"
