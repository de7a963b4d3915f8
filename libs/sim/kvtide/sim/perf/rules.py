"""How a simulated cluster serves, and the production conductor that does so."""

from dataclasses import dataclass

from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.limits import ConductorLimits
from kvtide.conductor.reducers.replication import ReplicationRules
from kvtide.conductor.serving import ServingRules
from kvtide.kv import NodeRef
from kvtide.policy import (
    ColumnPolicy,
    CostSeeds,
    PolicyName,
    Prediction,
    Targets,
    rules_of,
)
from kvtide.sim.perf.hosts import WORKER_CLASS
from kvtide.sim.perf.shapes import ClusterShape
from kvtide.store.eviction import Policy


@dataclass(frozen=True, slots=True)
class Rules:
    """How the cluster serves. Targets in ms; ``reject``: requests that would miss them.

    ``recheck``: decode itself refuses, after the prefill, what it would be too slow for.
    ``told``: decode workers report what was placed there and isn't there yet, as kvtide's
    do; without it they report only what they have, as the paper's early rejection sees.
    ``sample_s``: how often the state is sampled; never if 0.
    """

    policy: PolicyName = PolicyName.BEST
    prediction: Prediction = Prediction.FITTED
    balancing_ratio: float = 2.0
    ttft_ms: float = 30_000.0
    tbt_ms: float = 200.0
    reject: bool = False
    early: bool = True
    recheck: bool = False
    told: bool = True
    eviction: Policy = Policy.LRU
    sample_s: float = 0.0


def mind_of(shape: ClusterShape, rules: Rules, me: NodeRef) -> Dispatcher:
    """The production conductor, which knows what its workers take for their work."""
    node, engine = shape.text.node, shape.text.engine
    seeds = CostSeeds(
        load_bytes_per_s=node.host_bytes_per_s,
        remote_share=min(1.0, node.network_bytes_per_s / node.host_bytes_per_s),
        ssd_share=min(1.0, node.ssd_bytes_per_s / node.host_bytes_per_s),
        block_overhead_ms=0.0,
        handover_ms=engine.handover_ms,
        remote_handover_ms=engine.handover_ms,
        step_ms=shape.step.fixed_ms,
        overlap_share=1.0,
    )
    chosen = rules_of(
        rules.policy, balancing_ratio=rules.balancing_ratio, direct_blocks=0
    )
    targets = Targets(queue_ms=1e12, early=rules.early)
    return Dispatcher(
        me,
        policy=ColumnPolicy(chosen, seeds, targets),
        limits=ConductorLimits(booking_s=1e9),
        replication=_replication(rules, node.network_bytes_per_s),
        serving=ServingRules(
            prediction=rules.prediction,
            profiles={WORKER_CLASS: shape.profile},
            # nothing here takes time that no part's cost has
            calibrated=False,
        ),
    )


def _replication(rules: Rules, bytes_per_s: float) -> ReplicationRules:
    """Algorithm 1 copies on placement alone, without bounds; ``best`` also by heat."""
    if rules.policy is PolicyName.ALGORITHM1:
        return ReplicationRules(
            hot=float("inf"),
            cold=-1.0,
            balancing_ratio=rules.balancing_ratio,
            bytes_per_s=1e15,
            extra_share=1.0,
            fill_batch=0,
        )
    if rules.policy is PolicyName.BEST:
        return ReplicationRules(bytes_per_s=bytes_per_s / 10)
    return ReplicationRules(enabled=False)
