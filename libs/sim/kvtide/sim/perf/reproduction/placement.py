"""Figures 5, 10 and 11: policies, global against local, and copies."""

from dataclasses import replace

from kvtide.sim.perf.reproduction.bench import (
    TRACES,
    Bench,
    percent,
    seconds,
    split,
    table,
)

_FIG_5 = {
    "random": ("random", 19.65),
    "least_loaded": ("load balance", 5.27),
    "local_cache_aware": ("local cache aware", 3.58),
    "algorithm1": ("global cache aware", 3.07),
    "best": ("(ours)", None),
}


def figure_5(bench: Bench) -> str:
    """Average TTFT by policy, conversation, 16 nodes."""
    rows: list[tuple[str, ...]] = []
    found: dict[str, float] = {}
    for name, (label, published) in _FIG_5.items():
        report = bench.run(bench.trace("conversation"), name)
        found[name] = report.ttft_mean_ms
        rows.append(
            (
                f"`{name}`",
                label,
                "" if published is None else f"{published:.2f}",
                seconds(report.ttft_mean_ms),
                seconds(report.ttft_p99_ms),
                percent(report.hit_share),
                f"{report.prefill_gpu_s:,.0f}",
            )
        )
    least = [found[name] for name in _FIG_5 if name != "best"]
    order = "holds" if least == sorted(least, reverse=True) else "does not hold"
    gain = 1 - found["algorithm1"] / found["local_cache_aware"]
    ours = 1 - found["best"] / found["algorithm1"]
    heads = ("policy", "paper's name", "published s", "ours s", "p99 s", "hits")
    return f"""\
## Figure 5: average TTFT by policy

Conversation trace at its own rate, 8 prefill and 8 decode nodes, nothing rejected. The
paper gives 16 nodes, not how they are split.

{table((*heads, "prefill node seconds"), rows)}

The order random > load > local > global {order}. Global against local: {-gain:+.1%}
(published: -14 %). `best` against Algorithm 1: {-ours:+.1%}.

Why the values are lower than the published ones: at this rate, and with prefill as quick
as figure 14a has it, queues are short for every policy that looks at them. The published
values need longer queues; the paper says neither the split nor what a prefill took there.
"""


def figure_10(bench: Bench) -> str:
    """Global against local caches on ten prefill nodes."""
    published = {"conversation": ("2.22", "0.76"), "synthetic": ("2.36", "0.52")}
    rows: list[tuple[str, ...]] = []
    shape = split(bench.shape, 10, 10)
    for trace in TRACES:
        requests = [replace(each, output_tokens=1) for each in bench.trace(trace)]
        found = {
            name: bench.run(requests, name, shape=shape)
            for name in ("least_loaded", "local_cache_aware", "algorithm1", "best")
        }
        for local in ("least_loaded", "local_cache_aware"):
            for name in ("algorithm1", "best"):
                one, other = found[local], found[name]
                hits = other.hit_share / max(one.hit_share, 1e-9)
                spent = other.prefill_gpu_s / one.prefill_gpu_s
                rows.append(
                    (
                        trace,
                        f"`{name}` / `{local}`",
                        percent(other.hit_share),
                        percent(one.hit_share),
                        f"x{hits:.2f}",
                        f"x{published[trace][0]}",
                        f"x{spent:.2f}",
                        f"x{published[trace][1]}",
                    )
                )
    heads = ("trace", "global / local", "hits", "hits, local", "ratio", "published")
    return f"""\
## Figure 10: a global pool against local caches

10 prefill nodes of 3 M tokens, one token of output (the paper's set-up), 10 decode nodes
that have nothing else to do. The paper doesn't say how requests reach the local caches;
both ways are here: by load alone, and by load and local hits.

{table((*heads, "prefill time", "published"), rows)}

The published ratios, of hits and of prefill time, lie between the two ways of routing for
both traces: a router that sees only load leaves more to gain than the paper's had, one that
sees local hits leaves little. Which of the two the paper's "local" is isn't said.
Tool and agent trace (published 1.38 and 0.74 times): not at hand.
"""


def figure_11(bench: Bench) -> str:
    """Mean copies of the hundred blocks used most, by time."""
    rows: list[tuple[str, ...]] = []
    for trace in TRACES:
        for name in ("algorithm1", "best"):
            report = bench.run(bench.trace(trace), name)
            copies = [sample.copies for sample in report.samples] or [0.0]
            picked = [copies[len(copies) * part // 8] for part in range(1, 8)]
            cells = (f"{value:.1f}" for value in (*picked, copies[-1]))
            rows.append((trace, f"`{name}`", *cells))
    heads = ("trace", "policy", *(f"{n}/8" for n in range(1, 8)), "end")
    return f"""\
## Figure 11: copies of the 100 blocks used most

8 prefill nodes with stores, sampled every 30 s; mean copies at eighths of the run.
Published, read off the plot: conversation ends with about 7 to 8 copies of 8, synthetic
with about 4 to 5, fluctuating. Algorithm 1 has a balancing ratio of 2 (none published).

{table(heads, rows)}

Synthetic ends where the paper's does. Conversation rises and falls: one of its hundred blocks
is in all requests, the others have 21 to 43 uses, and 47 of them have their last one before
six eighths of the trace are over; LRU then lets their copies go. The paper's ends higher; what
memory its nodes had for this figure isn't known to us; with more of it copies would stay.
"""
