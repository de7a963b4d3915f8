"""What is kept of a bench: the machine, the figures as JSON, a plot as SVG."""

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from kvtide.transfer.bench_figures import Figure, size_text

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5cd1", "#b8860b", "#555555")


@dataclass(frozen=True, slots=True)
class Machine:
    """What ran a bench."""

    cpu: str
    cores: int
    kernel: str
    python: str
    xxhash: str

    def __str__(self) -> str:
        """In a line."""
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


def this_machine() -> Machine:
    """The one that we are on."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return Machine(
        models[0] if models else platform.processor(),
        os.cpu_count() or 1,
        platform.release(),
        platform.python_version(),
        xxhash.VERSION,
    )


def as_json(
    figures: Sequence[Figure],
    machine: Machine,
    versions: Mapping[str, str] | None = None,
) -> str:
    """Machine, versions of what else was measured, and figures."""
    report = {
        "machine": asdict(machine),
        "versions": dict(versions or {}),
        "figures": [asdict(each) for each in figures],
    }
    return json.dumps(report, indent=1)


def plot(figures: Sequence[Figure]) -> str:
    """GB/s by size, one line for each way to move bytes, as SVG."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for figure in figures:
        if figure.unit == "GB/s":
            name = figure.name.replace(f" {size_text(figure.nbytes)}", "")
            lines.setdefault(name, []).append((figure.nbytes, figure.value))
    sizes = sorted({size for points in lines.values() for size, _ in points})
    top = max(value for points in lines.values() for _, value in points)
    return "\n".join(_svg(lines, sizes, top))


def _svg(
    lines: dict[str, list[tuple[int, float]]], sizes: list[int], top: float
) -> Iterator[str]:
    width, height = 900, 40 + max(360, 18 * len(lines))
    across = {
        size: 60 + 440 * at / max(1, len(sizes) - 1) for at, size in enumerate(sizes)
    }

    def up(value: float) -> float:
        return height - 40 - (height - 80) * value / top

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    for size, x in across.items():
        yield (
            f'<text x="{x:.0f}" y="{height - 20}" text-anchor="middle">'
            f"{size_text(size)}</text>"
        )
    for step in range(5):
        value = top * step / 4
        yield f'<text x="8" y="{up(value):.0f}">{value:.1f}</text>'
        yield (
            f'<line x1="50" x2="510" y1="{up(value):.0f}" y2="{up(value):.0f}"'
            ' stroke="#ddd"/>'
        )
    yield '<text x="8" y="20">GB/s</text>'
    for at, (name, points) in enumerate(sorted(lines.items())):
        colour = COLOURS[at % len(COLOURS)]
        dash = ("", "6 3", "2 3")[at // len(COLOURS) % 3]
        path = " ".join(f"{across[size]:.0f},{up(value):.0f}" for size, value in points)
        style = (
            f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        )
        yield f'<polyline points="{path}" {style}/>'
        y = 30 + 18 * at
        yield f'<line x1="540" x2="570" y1="{y}" y2="{y}" {style}/>'
        yield f'<text x="580" y="{y + 4}">{name}</text>'
    yield "</svg>"
