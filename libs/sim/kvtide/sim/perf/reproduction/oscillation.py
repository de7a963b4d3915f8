"""The two loads under early rejection, with and without prediction (arXiv, figure 9)."""

from dataclasses import dataclass, replace

import numpy as np

from kvtide.policy import Prediction
from kvtide.sim.perf.outcomes import Report, Sample
from kvtide.sim.perf.reproduction.bench import Bench, percent, split, table
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.workload import SyntheticText, synthetic
from kvtide.sim.plots import Line, stacked

PLOT = "oscillation.svg"
_WARM_S = 180.0
_LOAD = SyntheticText(
    requests=4800,
    requests_per_s=4.0,
    prompt_tokens=32_000,
    output_tokens=1500,
    spread=0.3,
)
_MODES = {
    "early": Rules(told=False, prediction=Prediction.OFF),
    "early, told": Rules(prediction=Prediction.OFF),
    "uniform": Rules(prediction=Prediction.UNIFORM),
    "fitted": Rules(prediction=Prediction.FITTED),
}


@dataclass(frozen=True, slots=True)
class Swing:
    """Variance of each load after the first minutes, and how they go together."""

    prefill: float
    decode: float
    together: float

    @classmethod
    def of(cls, report: Report) -> "Swing":
        """Of a run's samples, up to the last arrival."""
        loads = np.array(
            [(s.prefill_load, s.decode_load) for s in _steady(report)]
        ).reshape(-1, 2)
        if len(loads) < 2:  # noqa: PLR2004
            return cls(0.0, 0.0, 0.0)
        spread = loads.std(axis=0)
        together = 0.0
        if spread.all():
            together = float(np.corrcoef(loads.T)[0, 1])
        return cls(float(spread[0] ** 2), float(spread[1] ** 2), together)


def oscillation_runs(bench: Bench) -> dict[str, Report]:
    """One run a mode, of the same requests."""
    size = bench.shape.text.model.block_tokens
    made = synthetic(_LOAD, size, rate=1.0, seed=1)
    # no two prompts have anything in common, so there is nothing to pool
    requests = [replace(each, blocks=()) for each in made]
    shape = split(bench.shape, 15, 5)
    found: dict[str, Report] = {}
    for name, mode in _MODES.items():
        rules = Rules(
            prediction=mode.prediction,
            told=mode.told,
            ttft_ms=30_000.0,
            tbt_ms=50.0,
            reject=True,
            sample_s=2.0,
        )
        found[name] = bench.run(requests, "algorithm1", rules, shape, seed=1)
    return found


def oscillation_plot(found: dict[str, Report]) -> str:
    """Both loads over time, a plot for each mode."""
    plots: list[tuple[str, list[Line]]] = []
    for name, report in found.items():
        steady = [s for s in report.samples if s.at_s <= _end_s(report)]
        lines = [
            Line("prefill", tuple((s.at_s, s.prefill_load) for s in steady)),
            Line("decode", tuple((s.at_s, s.decode_load) for s in steady)),
        ]
        plots.append((f"{name}: load over its target, by seconds", lines))
    return stacked(plots)


def oscillation(bench: Bench) -> str:
    """The section; its plot is beside the report."""
    found = oscillation_runs(bench)
    rows: list[tuple[str, ...]] = []
    for name, report in found.items():
        swing = Swing.of(report)
        steady = _steady(report)
        rows.append(
            (
                name,
                f"{np.mean([s.prefill_load for s in steady]):.2f}",
                f"{np.mean([s.decode_load for s in steady]):.2f}",
                f"{swing.prefill:.4f}",
                f"{swing.decode:.4f}",
                f"{swing.together:+.2f}",
                f"{report.rejected_early:,}",
                f"{report.tbt_mean_ms:.1f}",
                percent(report.goodput),
            )
        )
    heads = ("mode", "prefill load", "decode load", "variance, prefill")
    more = ("variance, decode", "correlation", "rejected", "TBT ms", "goodput")
    early, fitted = Swing.of(found["early"]), Swing.of(found["fitted"])
    return f"""\
## Oscillation of the two loads (arXiv version, figure 9)

20 nodes, 20 minutes, as in the paper; what it doesn't give was set before the run so that
decode is the scarcer half: 15 prefill and 5 decode nodes, {_LOAD.requests_per_s:.0f} requests
a second (Poisson, seed 1), prompts of {_LOAD.prompt_tokens:,.0f} and answers of
{_LOAD.output_tokens:,.0f} tokens on average, targets of 30 s and 50 ms, Algorithm 1, sampled every
2 s; the first {_WARM_S:.0f} s don't count. No prompt has anything in common with another. Load is
the mean over nodes of the queue over the TTFT target, and of a step over the TBT target.
*early*: decode's load is what its batch is now, as in the paper. *early, told*: decode counts
what is on its way to it, which kvtide's workers always report. *uniform*, *fitted*: decode's
load when the prefill will be done.

![Both loads over time]({PLOT})

{table((*heads, *more), rows)}

With prediction off the two loads swing against each other, as in the paper. With it (fitted)
the variance of prefill's load is {_share(fitted.prefill, early.prefill)} and that of decode's
{_share(fitted.decode, early.decode)} of that. Counting what is on its way to decode damps more, and without
any prediction. The paper's figure shows swings over most of the range, ours are smaller;
likely because a prefill takes 4 s here and an answer 75 s, so decode's load moves little in
the time that a decision takes to get there.

Goodput tells another thing. Admission fills decode up to a predicted pace of just the target,
and this workload always wants more; the TBT of a request is the mean of its longest tenth of
gaps, so with prediction most requests miss 50 ms by some per cent. *early, told* counts whole
answers, of what is there and of what is on its way, as if they were there already; so it
stays below the target, and what it serves is in time. Work that must meet a hard limit needs
a target below it; none was set here, since nothing is tuned.
"""


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _end_s(report: Report) -> float:
    return min(report.virtual_s, _LOAD.requests / _LOAD.requests_per_s)


def _steady(report: Report) -> list[Sample]:
    end_s = _end_s(report)
    return [s for s in report.samples if _WARM_S <= s.at_s <= end_s]
