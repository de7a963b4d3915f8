"""What every section of the report needs: the cluster, the traces, kept runs, tables."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from kvtide.sim.hit_rates import BLOCK_TOKENS, read_trace, replay
from kvtide.sim.perf.outcomes import Report
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.running import simulate
from kvtide.sim.perf.shapes import ClusterShape, read_cluster
from kvtide.sim.perf.workload import SimRequest, of_trace
from kvtide.store.eviction import Policy

TRACES = ("conversation", "synthetic")
SAMPLED = Rules(sample_s=30.0)
"""As figure 11 samples: runs that several figures need are made once."""

T = TypeVar("T")


class HitShare(msgspec.Struct, frozen=True):
    """Of all blocks looked up, the share that was there."""

    value: float


class Bench:
    """The paper's cluster and its traces, from the examples of this repository.

    A run whose result is in ``kept`` is not made again, whatever has become of the code
    since; a run that is stopped leaves nothing there.
    """

    def __init__(
        self,
        examples: Path,
        kept: Path,
        say: Callable[[Report], None] | None = None,
    ) -> None:
        """``kept`` is made when the first run ends; ``say`` hears of each new one."""
        self.examples = examples
        self._kept, self._say = kept, say
        self._traces: dict[str, list[SimRequest]] = {}

    @cached_property
    def shape(self) -> ClusterShape:
        """The A800 nodes as shipped: 8 for prefill, 8 for decode."""
        return read_cluster(self.examples / "clusters" / "a800-llama3-70b.toml")

    def trace(
        self, name: str, *, rate: float = 1.0, first: int | None = None
    ) -> list[SimRequest]:
        """The ``first`` requests of a trace, ``rate`` times as dense."""
        if name not in self._traces:
            size = self.shape.text.model.block_tokens
            self._traces[name] = of_trace(read_trace(self._path(name)), size)
        requests = self._traces[name][:first]
        return [replace(each, at_s=each.at_s / rate) for each in requests]

    def run(
        self,
        requests: Sequence[SimRequest],
        system: str,
        rules: Rules = SAMPLED,
        shape: ClusterShape | None = None,
        *,
        seed: int = 0,
    ) -> Report:
        """One simulation; ``seed`` is what the requests were made from."""
        shape = shape or self.shape
        key = _digest(shape.text, rules, requests, seed)
        path = self._kept / f"{system}-{key}.json"
        known = _read(path, Report)
        if known is None:
            known = simulate(shape, requests, system, rules, seed=seed)
            _write(path, known)
            if self._say is not None:
                self._say(known)
        return known

    def hit_share(self, trace: str, tokens: int) -> float:
        """Of one LRU pool of that size, which sees the trace's requests in order."""
        path = self._kept / f"pool-{trace}-{tokens}.json"
        known = _read(path, HitShare)
        if known is None:
            requests, blocks = read_trace(self._path(trace)), tokens // BLOCK_TOKENS
            counts = replay(requests, blocks, Policy.LRU, tail_first=True)
            known = HitShare(counts.hit_rate)
            _write(path, known)
        return known.value

    def text(self, section: str) -> str | None:
        """A section as it was made once, if somebody put it among what is kept."""
        path = self._kept / f"{section}.md"
        return path.read_text(encoding="utf-8") if path.exists() else None

    def _path(self, trace: str) -> Path:
        return self.examples / "traces" / f"{trace}.jsonl.gz"


def _digest(*parts: object) -> str:
    return blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _write(path: Path, made: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(made))
    part.replace(path)


def shuffled(requests: Sequence[SimRequest], seed: int) -> list[SimRequest]:
    """The same requests in the same order, the gaps between arrivals in another."""
    times = np.array([each.at_s for each in requests])
    gaps = np.diff(times)
    np.random.default_rng(seed).shuffle(gaps)
    moved = np.concatenate((times[:1], times[:1] + np.cumsum(gaps)))
    return [
        replace(each, at_s=float(at_s))
        for each, at_s in zip(requests, moved, strict=True)
    ]


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
