"""``docs/reproduction.md``: all sections, of runs that are kept."""

from collections.abc import Callable, Collection, Mapping

from kvtide.sim.perf.reproduction.arxiv import half_cached, real_workload
from kvtide.sim.perf.reproduction.bench import Bench
from kvtide.sim.perf.reproduction.capacity import figures_6_to_8, overload
from kvtide.sim.perf.reproduction.oscillation import oscillation
from kvtide.sim.perf.reproduction.placement import figure_5, figure_10, figure_11
from kvtide.sim.perf.reproduction.resources import figure_9, figure_13, figure_15
from kvtide.sim.perf.reproduction.seeds import best_against_algorithm1

SECTIONS: Mapping[str, Callable[[Bench], str]] = {
    "figure-5": figure_5,
    "figures-6-to-8": figures_6_to_8,
    "figure-9": figure_9,
    "figure-10": figure_10,
    "figure-11": figure_11,
    "figure-13": figure_13,
    "figure-15": figure_15,
    "overload": overload,
    "oscillation": oscillation,
    "half-cached": half_cached,
    "real-workload": real_workload,
    "best-against-algorithm-1": best_against_algorithm1,
}


def assemble(bench: Bench, without: Collection[str] = ()) -> str:
    """The report, which names the sections that it is ``without``.

    A section whose text is kept is taken from there. Of the others, the runs that aren't
    kept are made.
    """
    kept: list[str] = []
    parts = [_head(bench)]
    for name, make in SECTIONS.items():
        if name in without:
            continue
        text = bench.text(name)
        if text is not None:
            kept.append(name)
        parts.append(text or make(bench))
    rest = _names("Taken as an earlier state of the code made them", kept)
    rest += _names("Not run here; `kvtide sim reproduce` makes them", without)
    return "\n".join((*parts, _SPEED, _NOT_SHOWN + rest))


def _names(what: str, names: Collection[str]) -> str:
    return f"- {what}: {', '.join(names)}.\n" if names else ""


def _head(bench: Bench) -> str:
    shape = bench.shape
    prefill, step = shape.prefill, shape.step
    return f"""\
# The paper's figures again

Made by `kvtide sim reproduce`; do not edit. "The paper" is "Mooncake: Trading More Storage
for Less Computation" (FAST 2025), and its arXiv version where named.

## What was fixed before any run

- **Code**: the production conductor (dispatcher, prefix index, bookings, forecast, policies,
  replication) gets the events that a real cluster would send, beats twice a second
  included, and the stores' own eviction code decides what stays. Engines and links are
  models: a decode batch step by step, a prefill queue in order of arrival, loads and
  hand-overs over links whose flows share them. The batch and the queue are thin drives,
  since the workers' own machines say every token; tests have both do the same at the same
  times (`docs/adr/0014-the-performance-simulator-has-thin-workers.md`). They leave out:
  preemption (room for the whole answer is bound when it is placed), pages, chunks and steps
  shared by short prompts, patience (a prompt waits for another's blocks however long that
  takes), and whatever fails. A prompt that is ready passes one that still loads.
- **Cluster**: `examples/clusters/a800-llama3-70b.toml`, 8 prefill and 8 decode nodes unless
  said otherwise; every number there says whether it is published, derived or assumed.
- **Prefill**: {prefill.token_ms:.4f} ms a token and {prefill.pair_ms:.3e} ms an attended
  pair, from the paper's two published times (figure 14a: 1 s at 8,192 tokens, 27.5 s at
  131,072): {prefill.ms(8192, 0) / 1000:.2f} and {prefill.ms(131072, 0) / 1000:.1f} s here.
- **Decode**: a step takes {step.fixed_ms:.1f} ms, {step.row_ms:.3f} ms a request and
  {step.pair_ms * 1000:.4f} ms a thousand tokens of KV: weights and KV read at 70 % of the
  memory's rate and 8 ms for all-reduces. Assumed: the paper has no such figure.
- **Pool**: 3 M tokens of DRAM on each prefill node, none on decode nodes, LRU, no SSD;
  blocks of 512 tokens, whose ids the traces give; blocks of answers are not pooled, since
  the traces have no ids for them.
- **Network**: one link out and one in, 800 Gbps each, for each node.
- **Requests**: arrivals and lengths of the trace, in order. The first token is the one of
  decode's first step; the TBT of a request is the mean of the longest tenth of its gaps.
- **Baselines**: 16 engines of the same nodes; each request to the one with the fewest
  unfinished tokens; 256 requests a batch; KV in 90 % of GPU memory beside the weights;
  *plain* and *cached* compute waiting prompts first (at most 32,768 tokens at once) while
  decode waits; *cached* keeps blocks of its own requests in that memory, LRU; *chunked*
  computes 512 tokens a step, answers first.
- **Balancing ratio** of Algorithm 1: 2 (the paper publishes none).

Nothing was tuned to a published figure. One thing was changed after results were seen: see
the last section of runs, on `best` against Algorithm 1.
"""


_SPEED = """\
## Speed and size of the simulator

On one core of a machine that others used, so about right: the 12,031 requests of the
conversation trace on 16 nodes took 32 to 62 s of CPU, by policy and by what others did: 190
to 380 a second; coupled engines 2,000 a second and more. Two thirds of that is the production
conductor.

A million requests on a thousand nodes (`kvtide sim run examples/clusters/thousand-nodes.toml
examples/workloads/million.toml`) took 3,236 s of CPU in one process: 309 requests a second of a
core, and 194 by the clock, for the machine did much else. All were served, none rejected; TTFT
390 ms at the mean, 59 % of 6.2 billion prompt tokens reused, predicted first tokens 14 % off
(`ops/bench/results/sim_million.json`). Resident memory was 349 MB after 144,000 requests, 371
after 713,000, and never more than 423. The conductor's decision, which scores a thousand workers,
is half of the time, the beats of a thousand nodes a tenth; what is left has no large part. Memory
is bounded by rule: requests are read as they arrive, an outcome takes 12 bytes, stores have their
capacity and the conductor its limits. That run is older than the sections above: of before the
simulated workers were held to the real ones by tests (ADR 14), which changed where they bind
memory and what passes what, and not how much there is to do.
"""

_NOT_SHOWN = """\
## Not shown

- The tool and agent trace is not at hand: nothing is concluded for it.
- Figure 12 (transfer) is measured, not simulated: see `docs/transfer.md`.
"""
