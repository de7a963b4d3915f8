"""Figures 6 to 8 against coupled engines, and the overload table."""

from dataclasses import replace

from kvtide.policy import Prediction
from kvtide.sim.perf.outcomes import Report
from kvtide.sim.perf.reproduction.bench import (
    TRACES,
    Bench,
    percent,
    seconds,
    table,
)
from kvtide.sim.perf.rules import Rules

_SYSTEMS = (
    "best",
    "algorithm1",
    "coupled-plain",
    "coupled-cached",
    "coupled-chunked",
)
_TARGETS = ("25", "30", "40", "50", "75", "100", "200", "300")
_PUBLISHED = {
    "conversation": "+498 / +157 / +59 %",
    "synthetic": "+62 / +40 / +28 %",
}
_PAPERS_MS = 200.0
_FIG_8 = {"conversation": "1.56 / 1.43 / 1.90", "synthetic": "2.76 / 2.59 / 3.33"}


def figures_6_to_8(bench: Bench) -> str:
    """The share of requests that meet both targets, and prefill time."""
    parts: list[str] = []
    for trace in TRACES:
        requests = bench.trace(trace)
        found = {name: bench.run(requests, name) for name in _SYSTEMS}
        parts.append(_capacity(trace, found))
    body = "\n\n".join(parts)
    return f"""\
## Figures 6 to 8: effective request capacity and prefill time against coupled engines

16 nodes: 8 and 8, or 16 coupled engines. The share of requests with a TTFT of at most 30 s
and a TBT (mean of the longest tenth of the gaps) of at most the column's ms; traces at
their own rate, nothing rejected. Requests go to the coupled engine with the fewest tokens
unfinished.

{body}

Against all three baselines the gain grows as the target tightens, on both traces, as
published. Prefill time as a multiple of ours is within 4 % of the published one for plain and
cached engines, on both traces. For chunked ones it is lower: their extra time here is what a
step takes beyond decode's own, and the model has no cost for kernels that share a step.

On the synthetic trace the gains over plain engines are near the published ones, a little
lower. On the conversation trace they are much lower: a plain engine here keeps 100 ms for
62 % of the requests, while +498 % leaves it at most a sixth. A stall here is the time of the
prompts alone, and each request goes to the engine with the fewest tokens; the paper's
baseline is real vLLM 0.5.1 with its own overheads, its routing isn't said. Below 100 ms
chunked prefill loses what it keeps above: a step with a chunk of 512 tokens takes about 70 ms.

These are shares of requests in time at one rate, which is how the paper's figures are made.
They are not how many more requests fit: where both serve all in time the gain is zero, and
where the other serves few it is large, however near it comes.
"""


def _capacity(trace: str, found: dict[str, Report]) -> str:
    rows = [
        (
            f"`{name}`",
            *(percent(each.goodput_by_tbt[target]) for target in _TARGETS),
            seconds(each.ttft_mean_ms),
        )
        for name, each in found.items()
    ]
    ours = found["best"]
    gains: list[tuple[str, ...]] = []
    for name, each in found.items():
        if not name.startswith("coupled"):
            continue
        ratios = (
            ours.goodput_by_tbt[target] / max(each.goodput_by_tbt[target], 1e-9)
            for target in _TARGETS
        )
        cells = (f"{ratio - 1:+.0%}" if ratio < 1000 else "∞" for ratio in ratios)  # noqa: PLR2004
        times = f"x{each.prefill_gpu_s / ours.prefill_gpu_s:.2f}"
        gains.append((f"over `{name}`", *cells, times))
    return f"""\
### {trace}

{table(("system", *_TARGETS, "TTFT s"), rows)}

Gain of `best` by TBT target (published over plain vLLM at 100, 200, 300 ms:
{_PUBLISHED[trace]}), and prefill time as a multiple of ours (published for plain, cached,
chunked: {_FIG_8[trace]}):

{table(("", *_TARGETS, "prefill time"), gains)}"""


_MODES = {
    "baseline": Rules(early=False, told=False, prediction=Prediction.OFF),
    "early": Rules(told=False, prediction=Prediction.OFF),
    "early, told": Rules(prediction=Prediction.OFF),
    "predicted": Rules(prediction=Prediction.UNIFORM),
    "fitted": Rules(prediction=Prediction.FITTED),
}
_TABLE_3 = {"baseline": "4183", "early": "3771", "predicted": "3589"}


def overload(bench: Bench) -> str:
    """Rejections: decode checks alone, early, and predicted."""
    rows: list[tuple[str, ...]] = []
    requests = bench.trace("conversation", rate=2.0, first=2000)
    for tbt_ms in (200.0, 25.0):
        for name, mode in _MODES.items():
            if tbt_ms == _PAPERS_MS and name not in _TABLE_3:
                continue
            rules = replace(mode, reject=True, recheck=True, tbt_ms=tbt_ms)
            report = bench.run(requests, "algorithm1", rules)
            rejected = report.rejected_early + report.rejected_late
            rows.append(
                (
                    f"{tbt_ms:.0f}",
                    name,
                    _TABLE_3.get(name, "") if tbt_ms == _PAPERS_MS else "",
                    f"{rejected:,}",
                    f"{report.rejected_early:,}",
                    f"{report.rejected_late:,}",
                    percent(report.goodput),
                    f"{report.prefill_gpu_s:,.0f}",
                )
            )
    heads = ("TBT ms", "mode", "published", "rejected", "at arrival", "after prefill")
    return f"""\
## Overload (arXiv version, table 3)

8 prefill and 8 decode nodes, a TTFT of 30 s, requests twice as dense, Algorithm 1. The
paper replays 23,000 requests of a trace that isn't at hand; this is the first 2,000 of the
conversation trace. Its TBT target isn't known to us: 200 ms here, and a second time 25 ms,
which decode's model can miss (see *Decode* above). *baseline*: decode refuses after the
prefill. *early*: by decode's load as it is. *early, told*: with what is on its way to
decode, which kvtide's workers report. *predicted*, *fitted*: decode's load when the prefill
will be done, by the paper's uniform answers, and by those seen.

{table((*heads, "goodput", "prefill node seconds"), rows)}

At 200 ms decode is never near its target, so nothing tells the modes apart. At 25 ms the
published order holds: baseline > early > predicted, and the answers seen (*fitted*) predict
better than uniform ones. The ratios are larger than the published ones (1 : 0.90 : 0.86), on a
target that was set for the model and not for the paper's cluster.
"""
