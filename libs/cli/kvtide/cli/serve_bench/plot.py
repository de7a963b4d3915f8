"""How TTFT and TBT were spread, as SVG: the share of answers within a time."""

from collections.abc import Iterator, Sequence

from kvtide.cli.serve_bench.figures import Targets, Timing

_WIDTH, _HEIGHT, _GAP = 460, 300, 50
_MOST_POINTS = 200


def plot(timings: Sequence[Timing], targets: Targets, title: str) -> str:
    """Two panels side by side; the targets, where there are any, as dashed lines."""
    return "\n".join(_svg(timings, targets, title))


def _svg(timings: Sequence[Timing], targets: Targets, title: str) -> Iterator[str]:
    whole = 2 * (_WIDTH + _GAP)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {_HEIGHT + 80}"'
        ' font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{whole}" height="{_HEIGHT + 80}" fill="white"/>'
    yield f'<text x="{_GAP}" y="20">{_escaped(title)}</text>'
    ttfts = [each.ttft_ms for each in timings]
    tbts = [each.tbt_ms for each in timings if each.tbt_ms is not None]
    yield from _panel(_GAP, "TTFT, ms", ttfts, targets.ttft_ms)
    yield from _panel(_WIDTH + 2 * _GAP, "TBT, ms", tbts, targets.tbt_ms)
    yield "</svg>"


def _panel(
    left: int, name: str, values: list[float], target: float | None
) -> Iterator[str]:
    width, bottom = _WIDTH - _GAP, _HEIGHT + 40
    top_value = max([*values, target or 0.0, 1.0])

    def across(value: float) -> float:
        return left + width * value / top_value

    def up(share: float) -> float:
        return bottom - (_HEIGHT - 10) * share

    for step in range(5):
        share = step / 4
        yield (
            f'<line x1="{left}" x2="{left + width}" y1="{up(share):.0f}"'
            f' y2="{up(share):.0f}" stroke="#ddd"/>'
        )
        yield f'<text x="{left - 35}" y="{up(share) + 4:.0f}">{share:.0%}</text>'
        value = top_value * share
        yield (
            f'<text x="{across(value):.0f}" y="{bottom + 16}" text-anchor="middle">'
            f"{value:,.0f}</text>"
        )
    yield f'<text x="{left}" y="{bottom + 34}">{name}</text>'
    if target is not None:
        x = across(target)
        yield (
            f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{up(1):.0f}" y2="{bottom}"'
            ' stroke="#d1495b" stroke-dasharray="4 3"/>'
        )
    if values:
        ordered = sorted(values)
        every = max(1, len(ordered) // _MOST_POINTS)
        marks = [*range(0, len(ordered), every), len(ordered) - 1]
        path = " ".join(
            f"{across(ordered[at]):.1f},{up((at + 1) / len(ordered)):.1f}"
            for at in marks
        )
        yield (
            f'<polyline points="{path}" fill="none" stroke="#1b6ca8" stroke-width="2"/>'
        )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
