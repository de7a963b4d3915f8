"""Hit rates of traces by policy, order and size of the pool, beside published ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.sim.hit_rates import BLOCK_TOKENS, TraceRequest, read_trace, replay
from kvtide.store.eviction import Policy

DEFAULT_TOKENS = (10**5, 10**6, 3 * 10**6, 10**7, 5 * 10**7)
TABLE_1_BLOCKS = (1_000, 10_000, 30_000, 50_000, 100_000)

PUBLISHED: Mapping[str, Mapping[int, float]] = {
    "conversation": {
        10**4: 0.045,
        10**5: 0.07,
        10**6: 0.09,
        3 * 10**6: 0.165,
        10**7: 0.33,
        5 * 10**7: 0.40,
    },
    "synthetic": {
        10**4: 0.0,
        10**5: 0.01,
        10**6: 0.145,
        3 * 10**6: 0.31,
        10**7: 0.59,
        5 * 10**7: 0.66,
    },
}
"""FAST 2025, figure 9, one LRU pool, by tokens; read off the plot, so about right."""

TABLE_1: Mapping[Policy, tuple[float, ...]] = {
    Policy.LRU: (0.30, 0.40, 0.48, 0.50, 0.51),
    Policy.LFU: (0.30, 0.35, 0.43, 0.49, 0.51),
    Policy.LENGTH_AWARE: (0.30, 0.35, 0.42, 0.48, 0.50),
}
"""arXiv 2407.00079, table 1, of another trace: 23,608 requests, not released as it was."""


class HitRow(msgspec.Struct, frozen=True):
    """One replay. ``prefix_hit_rate``: hits before a request's first miss alone."""

    trace: str
    policy: str
    tail_first: bool
    tokens: int
    hit_rate: float
    prefix_hit_rate: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace by the name of its file."""

    name: str
    requests: Sequence[TraceRequest]

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """See ``read_trace``."""
        return cls(path.name.split(".")[0].removesuffix("_trace"), read_trace(path))

    @property
    def block_tokens(self) -> int:
        """Of its first request; a trace is of one model."""
        return self.requests[0].block_tokens if self.requests else BLOCK_TOKENS


def measure(
    trace: Trace, policies: Sequence[Policy], tokens: Sequence[int]
) -> Iterator[HitRow]:
    """Replay for each policy, in both orders, at each size."""
    for policy in policies:
        for tail_first in (False, True):
            for size in tokens:
                capacity = size // max(1, trace.block_tokens)
                found = replay(trace.requests, capacity, policy, tail_first=tail_first)
                yield HitRow(
                    trace=trace.name,
                    policy=policy,
                    tail_first=tail_first,
                    tokens=size,
                    hit_rate=found.hit_rate,
                    prefix_hit_rate=found.prefix_hit_rate,
                )


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table: what it is of, and a rate for each column (None: unknown)."""

    policy: str
    order: str
    counted: str
    rates: tuple[float | None, ...]


def lines_of(rows: Sequence[HitRow], trace: str, tokens: Sequence[int]) -> list[Line]:
    """The published line, then two for each policy and order: all hits, usable ones."""
    lines: list[Line] = []
    published = PUBLISHED.get(trace)
    if published is not None:
        rates = tuple(published.get(size) for size in tokens)
        lines.append(Line("LRU, published (about)", "", "all", rates))
    grouped: dict[tuple[str, bool], list[HitRow]] = {}
    for row in rows:
        if row.trace == trace:
            grouped.setdefault((row.policy, row.tail_first), []).append(row)
    for (policy, tail_first), found in grouped.items():
        order = "tail first" if tail_first else "front first"
        every = tuple(row.hit_rate for row in found)
        usable = tuple(row.prefix_hit_rate for row in found)
        lines.append(Line(policy, order, "all", every))
        lines.append(Line(policy, order, "prefix", usable))
    return lines


def size_text(tokens: int) -> str:
    """As ``3e6``."""
    digits, _, power = f"{tokens:e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def rate_text(rate: float | None) -> str:
    """As ``.136``."""
    return "" if rate is None else f"{rate:.3f}".removeprefix("0")


def markdown(traces: Sequence[Trace], command: str) -> str:
    """``docs/hit-rates.md``: every policy, both orders, the default sizes."""
    rows = [
        row for trace in traces for row in measure(trace, tuple(Policy), DEFAULT_TOKENS)
    ]
    parts = (
        _HEAD.format(command=command),
        *(_trace_section(trace, rows) for trace in traces),
        _differences(rows),
        _table_1(traces),
    )
    return "\n".join(parts)


_HEAD = """\
# Hit rates of the pool's own eviction code

Made by `{command}`; do not edit.

One pool of blocks of 512 tokens that starts empty; `examples/traces` has the traces. For
each request in turn all its blocks are looked up front to back; a hit is a block that was
there. Then each is used if it is there and put in if not: *front first* in the same
order, or *tail first* as a store does it, which lets the tail of a chain go before its
head. *All* counts every hit, *prefix* only those before a request's first miss, which
alone serving can use. The rates are shares of all blocks looked up. The policies are
those in `services/store/kvtide/store/eviction`. Nothing was tuned to match.
"""


_WHY = """
Tail first matters to prefixes, hardly to hits: with it LRU has no block whose head is
gone, so every hit can be used; front first, some hits are behind a hole where a pool
holds little more than a request. Policies that count uses see the head of a chain used at
least as often as its tail, and keep it by that."""


def _trace_section(trace: Trace, rows: Sequence[HitRow]) -> str:
    lines = lines_of(rows, trace.name, DEFAULT_TOKENS)
    return f"""\
## {trace.name}: {len(trace.requests):,} requests, by tokens in the pool

{_table(("policy", "order", "counted"), map(size_text, DEFAULT_TOKENS), lines)}
"""


def _table(heads: Sequence[str], columns: Iterator[str], lines: Sequence[Line]) -> str:
    titles = [*heads, *columns]
    text = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for line in lines:
        cells = (line.policy, line.order, line.counted, *map(rate_text, line.rates))
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _differences(rows: Sequence[HitRow]) -> str:
    """What tail first and counting prefixes alone change, for each policy."""
    lines = [
        "## What tail first and counting prefixes alone change\n",
        "The largest over both traces and all sizes, in points of a hundred: what tail first",
        "gains against front first, and the hits behind a hole, which serving can not use.\n",
        "| policy | all hits, tail first | lost to holes, front first | tail first |",
        "|---|---|---|---|",
    ]
    for policy in Policy:
        own = [row for row in rows if row.policy == policy]
        front = {(r.trace, r.tokens): r for r in own if not r.tail_first}
        tail = {(r.trace, r.tokens): r for r in own if r.tail_first}
        gain = max((tail[k].hit_rate - front[k].hit_rate for k in front), key=abs)
        lost = [
            max(row.hit_rate - row.prefix_hit_rate for row in each.values())
            for each in (front, tail)
        ]
        cells = (f"{100 * gain:+.1f}", *(f"{100 * each:.1f}" for each in lost))
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    lines.append(_WHY)
    return "\n".join(lines) + "\n"


def _table_1(traces: Sequence[Trace]) -> str:
    """Beside the table of policies in the arXiv version of the paper."""
    lines = [
        Line(f"{policy}, published", "another trace", "all", rates)
        for policy, rates in TABLE_1.items()
    ]
    sizes = [blocks * BLOCK_TOKENS for blocks in TABLE_1_BLOCKS]
    for trace in traces:
        for policy in Policy:
            found = [
                replay(trace.requests, size // BLOCK_TOKENS, policy) for size in sizes
            ]
            rates = tuple(each.hit_rate for each in found)
            lines.append(Line(policy, trace.name, "all", rates))
    columns = (f"{blocks // 1000}k" for blocks in TABLE_1_BLOCKS)
    return f"""\
## By blocks in the pool, beside the paper's table of policies

The published lines (arXiv 2407.00079, table 1) are of a trace with 23,608 requests, of
which at least half of the blocks can hit. It is neither of these two, so no more than the
order of the policies can be compared.

{_table(("policy", "trace", "counted"), columns, lines)}
"""
