"""Line plots as SVG that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 260, 64, 40, 14
_COLOURS = ("#1f6feb", "#d1570a", "#2e8b57", "#8a4fbf", "#b8860b", "#444444")
_LETTER, _GAP = 7, 14
"""About as wide as a letter is, and between two names, in pixels."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]


def stacked(plots: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """A file of its own: plots with their titles, one below the other."""
    each = _HEIGHT + 30
    size = f'width="{_WIDTH}" height="{each * len(plots)}"'
    box = f'viewBox="0 0 {_WIDTH} {each * len(plots)}"'
    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {size} {font}>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, (title, lines) in enumerate(plots):
        parts.append(
            f'<g transform="translate(0 {place * each})">'
            f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>'
            f'<g transform="translate(0 26)">{_drawn(lines, log_x=False)}</g></g>'
        )
    return "".join((*parts, "</svg>\n"))


def inline(title: str, lines: Sequence[Line], *, log_x: bool = False) -> str:
    """For a page. All values are finite, and above zero where the axis is a log."""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}" font-size="12">'
        f"{_drawn(lines, log_x=log_x)}</svg>"
    )


def _drawn(lines: Sequence[Line], *, log_x: bool) -> str:
    xs = [x for line in lines for x, _ in line.points]
    top = max((y for line in lines for _, y in line.points), default=0.0) or 1.0
    low, high = _scaled(min(xs), log_x=log_x), _scaled(max(xs), log_x=log_x)
    span = (high - low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = (_scaled(x, log_x=log_x) - low) / span
        return (
            _LEFT + across * (_WIDTH - _LEFT - 10),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _BOTTOM - _TOP),
        )

    parts = [_axes(top, low, high, log_x=log_x)]
    name_x = _LEFT
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line.points)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )
        if len(lines) > 1:
            parts.append(
                f'<text x="{name_x}" y="{_HEIGHT - 4}" '
                f'fill="{colour}">{escape(line.name)}</text>'
            )
            name_x += _LETTER * len(line.name) + _GAP
    return "".join(parts)


def _axes(top: float, low: float, high: float, *, log_x: bool) -> str:
    floor = _HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH - 10}" fill="none" stroke="#888"/>'
    ]
    for step in range(5):
        y = floor - step / 4 * (floor - _TOP)
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{_short(top * step / 4)}</text>'
        )
        value = low + (high - low) * step / 4
        x = _LEFT + step / 4 * (_WIDTH - _LEFT - 30)
        label = _short(10**value if log_x else value)
        parts.append(f'<text x="{x:.0f}" y="{floor + 18}">{label}</text>')
    return "".join(parts)


def _scaled(x: float, *, log_x: bool) -> float:
    return log10(max(x, 1e-12)) if log_x else x


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
