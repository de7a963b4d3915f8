"""What a policy sees, in columns: one row a worker, one entry a copy.

The same as ``views``, for thousands of workers and of copies. Hosts and nodes are small
numbers; host 0 is that of all nodes that share memory with nobody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.kv import Located, NodeRef, Tier
from kvtide.policy.curves import CostSeeds, load_curve, prefill_curve
from kvtide.policy.views import Ask, Cluster, DecodeWorker, PrefillWorker

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NO_HOST = 0


@dataclass(frozen=True, slots=True)
class PrefillColumns:
    """Prefill workers in a fixed order; curves are resolved (see ``PrefillWorker``)."""

    refs: Sequence[NodeRef]
    node: Ints
    host: Ints
    waiting_ms: Floats
    waiting_tokens: Floats
    inflows: Floats
    pending_blocks: Ints
    pending_ms: Floats
    fixed_ms: Floats
    token_ms: Floats
    pair_ms: Floats
    load_fixed_ms: Floats
    near_byte_ms: Floats
    far_byte_ms: Floats

    def take(self, rows: Ints) -> "PrefillColumns":
        """Those rows, in that order."""
        names = [field.name for field in fields(self) if field.name != "refs"]
        columns: dict[str, NDArray[Any]] = {n: getattr(self, n)[rows] for n in names}
        wanted: list[int] = rows.tolist()
        return PrefillColumns([self.refs[row] for row in wanted], **columns)


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Decode workers in a fixed order. ``fixed_ms`` is nan where no curve was fitted."""

    refs: Sequence[NodeRef]
    node: Ints
    host: Ints
    running: Floats
    ahead: Floats
    waiting: Floats
    kv_tokens: Floats
    capacity: Floats
    step_ms: Floats
    coming: Floats
    coming_kv_tokens: Floats
    fixed_ms: Floats
    row_ms: Floats
    pair_ms: Floats
    fill_tokens: Floats


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that may be chosen; ``outflows`` by host number."""

    prefills: PrefillColumns
    decodes: DecodeColumns
    outflows: Floats


@dataclass(frozen=True, slots=True)
class Holdings:
    """The copies of a prompt's first ``blocks`` blocks, in columns of one length.

    By block: the first one's copies come first.
    ``located`` makes the copy in a row of these columns an object.
    """

    blocks: int
    block: Ints
    host: Ints
    ssd: Flags
    hint: Flags
    located: Callable[[int], Located]


def nothing_held() -> Holdings:
    """Of a prompt of which the pool has nothing."""
    none, no = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)

    def located(row: int) -> Located:
        raise IndexError(row)

    return Holdings(0, none, none, no, no, located)


class HostNumbers:
    """Numbers for the hosts of one cluster, in the order of their names."""

    def __init__(self, ask: Ask, cluster: Cluster) -> None:
        """Of all that occur."""
        names = {worker.host for worker in (*cluster.prefills, *cluster.decodes)}
        names |= {copy.host for copies in ask.prefix for copy in copies}
        names |= set(cluster.outflows)
        order = ["", *sorted(names - {""})]
        self._numbers = {name: n for n, name in enumerate(order)}

    def __len__(self) -> int:
        """Numbers that are in use."""
        return len(self._numbers)

    def of(self, host: str) -> int:
        """The number of a host."""
        return self._numbers[host]


def fleet_of(cluster: Cluster, hosts: HostNumbers, seeds: CostSeeds) -> Fleet:
    """A cluster's workers as columns."""
    refs = {*(w.ref for w in cluster.prefills), *(w.ref for w in cluster.decodes)}
    nodes = {ref: n for n, ref in enumerate(sorted(refs))}
    outflows = np.zeros(len(hosts))
    for host, flows in cluster.outflows.items():
        outflows[hosts.of(host)] = flows
    return Fleet(
        _prefills(cluster.prefills, nodes, hosts, seeds),
        _decodes(cluster.decodes, nodes, hosts),
        outflows,
    )


def holdings_of(ask: Ask, hosts: HostNumbers) -> Holdings:
    """A request's copies as columns."""
    flat = [(n, copy) for n, copies in enumerate(ask.prefix) for copy in copies]
    tiers = [copy.located.slot.tier is Tier.SSD for _, copy in flat]
    return Holdings(
        blocks=len(ask.prefix),
        block=np.array([n for n, _ in flat], dtype=np.int64),
        host=np.array([hosts.of(copy.host) for _, copy in flat], dtype=np.int64),
        ssd=np.array(tiers, dtype=bool),
        hint=np.array([copy.hint for _, copy in flat], dtype=bool),
        located=lambda row: flat[row][1].located,
    )


def _prefills(
    workers: Sequence[PrefillWorker],
    nodes: dict[NodeRef, int],
    hosts: HostNumbers,
    seeds: CostSeeds,
) -> PrefillColumns:
    curves = [w.curve or prefill_curve(w.tokens_per_s, seeds) for w in workers]
    loads = [w.loading or load_curve(w.load_bytes_per_s, seeds) for w in workers]
    return PrefillColumns(
        refs=[w.ref for w in workers],
        node=np.array([nodes[w.ref] for w in workers], dtype=np.int64),
        host=np.array([hosts.of(w.host) for w in workers], dtype=np.int64),
        waiting_ms=_floats([w.waiting_ms for w in workers]),
        waiting_tokens=_floats([w.waiting_tokens for w in workers]),
        inflows=_floats([w.inflows for w in workers]),
        pending_blocks=np.array([w.pending_blocks for w in workers], dtype=np.int64),
        pending_ms=_floats([w.pending_ms for w in workers]),
        fixed_ms=_floats([curve.fixed_ms for curve in curves]),
        token_ms=_floats([curve.token_ms for curve in curves]),
        pair_ms=_floats([curve.pair_ms for curve in curves]),
        load_fixed_ms=_floats([load.fixed_ms for load in loads]),
        near_byte_ms=_floats([load.near_byte_ms for load in loads]),
        far_byte_ms=_floats([load.far_byte_ms for load in loads]),
    )


def _decodes(
    workers: Sequence[DecodeWorker], nodes: dict[NodeRef, int], hosts: HostNumbers
) -> DecodeColumns:
    nan = float("nan")
    curves = [w.curve for w in workers]
    return DecodeColumns(
        refs=[w.ref for w in workers],
        node=np.array([nodes[w.ref] for w in workers], dtype=np.int64),
        host=np.array([hosts.of(w.host) for w in workers], dtype=np.int64),
        running=_floats([w.running for w in workers]),
        ahead=_floats([w.waiting + w.booked for w in workers]),
        waiting=_floats([w.waiting for w in workers]),
        kv_tokens=_floats([w.kv_tokens for w in workers]),
        capacity=_floats([w.kv_tokens_capacity for w in workers]),
        step_ms=_floats([w.step_ms for w in workers]),
        coming=_floats([w.coming for w in workers]),
        coming_kv_tokens=_floats([w.coming_kv_tokens for w in workers]),
        fixed_ms=_floats([nan if c is None else c.fixed_ms for c in curves]),
        row_ms=_floats([nan if c is None else c.row_ms for c in curves]),
        pair_ms=_floats([nan if c is None else c.pair_ms for c in curves]),
        fill_tokens=_floats([w.fill_tokens for w in workers]),
    )


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)
