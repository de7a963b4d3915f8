"""A plan as one HTML page that needs nothing else; plots are inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10

import numpy as np

from kvtide.sim.plan.study import Study, Try
from kvtide.sim.plan.verdict import Verdict

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 260, 64, 40, 14
_COLOURS = ("#1f6feb", "#d1570a", "#2e8b57", "#8a4fbf")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]


def page(title: str, study: Study, verdict: Verdict) -> str:
    """The whole page."""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.reasons)
    body = "".join((_systems(study), *_plots(study)))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; color: #1c1f23; background: #fff }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin: 0 0 .3rem }}
.verdict {{ border-left: 4px solid {"#2e8b57" if verdict.pool else "#d1570a"};
  padding: .2rem 1rem; margin: 1rem 0 }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1.5rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
td, th {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
td:first-child, th:first-child {{ text-align: left }}
</style></head><body>
<h1>{escape(title)}</h1>
<div class="verdict"><strong>{escape(verdict.advice)}</strong><ul>{reasons}</ul></div>
{_facts(study)}{body}
</body></html>
"""


def _facts(study: Study) -> str:
    reuse = study.reuse
    between = "nothing comes again"
    if len(reuse.seconds):
        size = study.shape.text.model.block_tokens
        tokens = float(np.median(reuse.distance)) * size
        between = (
            f"of what comes again, half comes within {float(np.median(reuse.seconds)):,.0f} s "
            f"and {tokens:,.0f} tokens"
        )
    return (
        f"<p>{reuse.requests:,} requests; prompts {reuse.prompt_tokens:,.0f} tokens, answers "
        f"{reuse.answer_tokens:,.0f} on average; an unlimited pool would have "
        f"{reuse.most:.1%} of all blocks; {reuse.used_once:.1%} of the different blocks are "
        f"used once; {between}.</p>"
    )


def _systems(study: Study) -> str:
    heads = ("", "goodput", "TTFT mean ms", "p99", "TBT mean ms", "p99", "hits")
    rows = [("with the pool", study.best.report)]
    rows += [(each.system, each) for each in study.baselines]
    lines = "".join(
        f"<tr><td>{escape(name)}</td><td>{each.goodput:.1%}</td>"
        f"<td>{each.ttft_mean_ms:,.0f}</td><td>{each.ttft_p99_ms:,.0f}</td>"
        f"<td>{each.tbt_mean_ms:,.0f}</td><td>{each.tbt_p99_ms:,.0f}</td>"
        f"<td>{each.hit_share:.1%}</td></tr>"
        for name, each in rows
    )
    titles = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _plots(study: Study) -> tuple[str, ...]:
    size = study.shape.text.model.block_tokens
    sizes = np.geomspace(1e4, 1e8, 60)
    hits = tuple((float(s), study.reuse.hit_rate(s / size)) for s in sizes)
    network = study.shape.text.node.network_bytes_per_s / 1e9
    pay = study.break_even
    kv_gb = study.shape.model.kv_bytes / 1e9
    return (
        '<div class="plots">',
        plot("Hit rate by tokens in one LRU pool", (Line("hits", hits),), log_x=True),
        plot(
            "Break-even bandwidth (GB/s) by prefix tokens",
            (
                Line("peak compute", tuple((p.tokens, p.nominal / 1e9) for p in pay)),
                Line("real compute", tuple((p.tokens, p.real / 1e9) for p in pay)),
                Line("network", tuple((p.tokens, network) for p in pay)),
            ),
            log_x=True,
        ),
        plot("Goodput by prefill nodes", (_line("goodput", study.splits, "goodput"),)),
        plot("Mean TTFT (ms) by prefill nodes", (_line("TTFT", study.splits),)),
        plot(
            "Mean TTFT (ms) by DRAM and by SSD, GB a node",
            (
                _line("DRAM", study.dram, scale=kv_gb),
                _line("SSD", study.ssd, scale=kv_gb),
            ),
        ),
        plot(
            "Mean TTFT (ms) by network, GB/s a node",
            (_line("TTFT", study.network, scale=1e-9),),
        ),
        "</div>",
    )


def _line(
    name: str, tries: Sequence[Try], field: str = "ttft_mean_ms", scale: float = 1.0
) -> Line:
    return Line(
        name,
        tuple((each.value * scale, getattr(each.report, field)) for each in tries),
    )


def plot(title: str, lines: Sequence[Line], *, log_x: bool = False) -> str:
    """One plot; all values must be finite, and above zero where the axis is a log."""
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
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line.points)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )
        if len(lines) > 1:
            parts.append(
                f'<text x="{_WIDTH - 110}" y="{_TOP + 14 + 16 * number}" '
                f'fill="{colour}">{escape(line.name)}</text>'
            )
    return (
        f"<figure><h2>{escape(title)}</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}" font-size="12">{"".join(parts)}</svg>'
        "</figure>"
    )


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
