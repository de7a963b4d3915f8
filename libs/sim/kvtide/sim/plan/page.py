"""A plan as one HTML page that needs nothing else; plots are inline SVG."""

from collections.abc import Sequence
from html import escape

import numpy as np

from kvtide.sim.plan.facts import facts
from kvtide.sim.plan.study import Study, Try
from kvtide.sim.plan.verdict import Verdict
from kvtide.sim.plots import Line, inline


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
    lines = "".join(f"<li>{escape(line)}</li>" for line in facts(study))
    return f"<ul>{lines}</ul>"


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
    """One plot under its title; see ``plots.inline``."""
    return (
        f"<figure><h2>{escape(title)}</h2>{inline(title, lines, log_x=log_x)}</figure>"
    )
