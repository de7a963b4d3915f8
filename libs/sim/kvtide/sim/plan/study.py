"""The runs behind a plan: splits, baselines, and more or less of each resource."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvtide.policy.analytic import NodeShape, break_even_bytes_per_s
from kvtide.sim.perf.outcomes import Report
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.running import simulate
from kvtide.sim.perf.shapes import ClusterShape
from kvtide.sim.perf.workload import SimRequest
from kvtide.sim.plan.reuse import Reuse, reuse_of

PREFIX_TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
BASELINES = ("coupled-plain", "coupled-cached", "coupled-chunked")
_SCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_MOST_SPLITS = 7


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Bandwidth in bytes a second above which reuse pays: at nominal compute, at real."""

    tokens: int
    nominal: float
    real: float


@dataclass(frozen=True, slots=True)
class Try:
    """One run by what was changed: ``value`` in the resource's unit."""

    value: float
    report: Report


@dataclass(frozen=True, slots=True)
class Study:
    """All that a plan rests on. ``splits`` by prefill nodes, the rest at the best one."""

    shape: ClusterShape
    rules: Rules
    reuse: Reuse
    break_even: tuple[BreakEven, ...]
    baselines: tuple[Report, ...]
    splits: tuple[Try, ...]
    dram: tuple[Try, ...]
    ssd: tuple[Try, ...]
    network: tuple[Try, ...]

    @property
    def best(self) -> Try:
        """The split with the most goodput, of equals the one with the least TTFT."""
        return min(self.splits, key=lambda each: _rank(each.report))

    @property
    def instead(self) -> Report:
        """The best of the baselines."""
        return min(self.baselines, key=_rank)


def study(
    requests: Sequence[SimRequest],
    shape: ClusterShape,
    rules: Rules,
    say: Callable[[str], None],
) -> Study:
    """Run everything; ``say`` is told what runs. Nothing is rejected in these runs."""
    say("reuse")
    reuse = reuse_of(requests, shape.text.model.block_tokens)
    baselines: list[Report] = []
    for name in BASELINES:
        say(name)
        baselines.append(simulate(shape, requests, name, rules))
    nodes = shape.text.prefills + shape.text.decodes
    splits: list[Try] = []
    for prefills in _splits(nodes):
        say(f"{prefills} prefill and {nodes - prefills} decode nodes")
        other = msgspec.structs.replace(
            shape.text, prefills=prefills, decodes=nodes - prefills
        )
        report = simulate(ClusterShape(other), requests, "best", rules)
        splits.append(Try(prefills, report))
    chosen = int(min(splits, key=lambda each: _rank(each.report)).value)
    text = msgspec.structs.replace(shape.text, prefills=chosen, decodes=nodes - chosen)
    node = shape.text.node

    def vary(name: str, values: Sequence[float]) -> tuple[Try, ...]:
        tries: list[Try] = []
        for value in values:
            say(f"{name} {value:,.0f}")
            changed = msgspec.structs.replace(node, **{name: value})
            other = ClusterShape(msgspec.structs.replace(text, node=changed))
            tries.append(Try(value, simulate(other, requests, "best", rules)))
        return tuple(tries)

    pool = node.pool_tokens or 1_000_000
    return Study(
        shape,
        rules,
        reuse,
        tuple(break_even(shape, tokens) for tokens in PREFIX_TOKENS),
        tuple(baselines),
        tuple(splits),
        vary("pool_tokens", [0, *(int(pool * scale) for scale in _SCALES)]),
        vary("ssd_tokens", [0, pool, 4 * pool, 16 * pool]),
        vary("network_bytes_per_s", [node.network_bytes_per_s * s for s in _SCALES]),
    )


def break_even(shape: ClusterShape, tokens: int) -> BreakEven:
    """The paper's inequality, and the same with the time that prefill really takes."""
    node: NodeShape = shape.node
    real_s = shape.prefill.ms(tokens, 0) / 1000
    return BreakEven(
        tokens,
        break_even_bytes_per_s(shape.model, node, tokens),
        shape.model.kv_bytes * tokens / real_s,
    )


def enough(tries: Sequence[Try], *, gain: float = 0.05) -> Try | None:
    """The least of it after which no larger one is better by ``gain``; None if all are.

    Better is a shorter mean TTFT, or more goodput by a point of a hundred.
    """
    for place, each in enumerate(tries[:-1]):
        later = tries[place + 1 :]
        quicker = min(other.report.ttft_mean_ms for other in later)
        more = max(other.report.goodput for other in later)
        slow = quicker < each.report.ttft_mean_ms * (1 - gain)
        if not slow and more < each.report.goodput + 0.01:
            return each
    return None


def _splits(nodes: int) -> list[int]:
    """Up to seven numbers of prefill nodes, evenly between one and all but one."""
    count = min(_MOST_SPLITS, nodes - 1)
    if count <= 1:
        return [1]
    return sorted({1 + round(n * (nodes - 2) / (count - 1)) for n in range(count)})


def _rank(report: Report) -> tuple[float, float]:
    return -round(report.goodput, 3), report.ttft_mean_ms
