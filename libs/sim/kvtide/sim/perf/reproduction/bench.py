"""What every section of the report needs: the cluster, the traces, tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.sim.perf.outcomes import Report
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.running import simulate
from kvtide.sim.perf.shapes import ClusterShape, read_cluster
from kvtide.sim.perf.workload import SimRequest, read_workload

TRACES = ("conversation", "synthetic")


@dataclass(frozen=True, slots=True)
class Bench:
    """The paper's cluster and its traces, from the examples of this repository."""

    examples: Path

    @property
    def shape(self) -> ClusterShape:
        """The A800 nodes as shipped: 8 for prefill, 8 for decode."""
        return read_cluster(self.examples / "clusters" / "a800-llama3-70b.toml")

    def trace(self, name: str, *, rate: float = 1.0) -> list[SimRequest]:
        """A trace, ``rate`` times as dense."""
        path = self.examples / "traces" / f"{name}.jsonl.gz"
        return read_workload(path, self.shape.text.model.block_tokens, rate=rate)

    def run(
        self,
        requests: Sequence[SimRequest],
        system: str,
        rules: Rules | None = None,
        shape: ClusterShape | None = None,
    ) -> Report:
        """One simulation."""
        return simulate(shape or self.shape, requests, system, rules)


def split(shape: ClusterShape, prefills: int, decodes: int) -> ClusterShape:
    """The same nodes in other roles."""
    text = msgspec.structs.replace(shape.text, prefills=prefills, decodes=decodes)
    return ClusterShape(text)


def with_node(shape: ClusterShape, **changes: float) -> ClusterShape:
    """The same cluster of other nodes."""
    node = msgspec.structs.replace(shape.text.node, **changes)
    return ClusterShape(msgspec.structs.replace(shape.text, node=node))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def seconds(ms: float) -> str:
    """As ``1.23``."""
    return f"{ms / 1000:.2f}"


def percent(share: float) -> str:
    """As ``12.3 %``."""
    return f"{100 * share:.1f} %"
