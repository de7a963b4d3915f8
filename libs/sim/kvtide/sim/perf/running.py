"""One run by name: a pooled cluster under a policy, or one of the baselines."""

from collections.abc import Iterable
from dataclasses import replace

from kvtide.policy import PolicyName
from kvtide.runtime import ConfigError
from kvtide.sim.perf.coupled import Coupled, CoupledCluster
from kvtide.sim.perf.outcomes import Report, report
from kvtide.sim.perf.pooled import PooledCluster
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.shapes import ClusterShape
from kvtide.sim.perf.workload import SimRequest

SYSTEMS: tuple[str, ...] = (
    *(name.value for name in PolicyName),
    *(f"coupled-{kind.value}" for kind in Coupled),
)
"""What ``simulate`` can run."""


def simulate(
    shape: ClusterShape,
    requests: Iterable[SimRequest],
    system: str,
    rules: Rules | None = None,
    *,
    seed: int = 0,
) -> Report:
    """Run to the end. Equal arguments give equal reports, bit for bit.

    ``requests`` come in order of arrival; a stream is read as they arrive.
    ``rules.policy`` is that of ``system``. ``seed`` is what the requests were made from.

    Raises:
        ConfigError: ``system`` is none of ``SYSTEMS``.
    """
    rules = rules or Rules()
    if system not in SYSTEMS:
        message = f"--policy {system!r}: one of {', '.join(SYSTEMS)}"
        raise ConfigError(message, key="policy")
    if system.startswith("coupled-"):
        kind = Coupled(system.removeprefix("coupled-"))
        cluster = CoupledCluster(shape, kind, requests)
    else:
        rules = replace(rules, policy=PolicyName(system))
        cluster = PooledCluster(shape, rules, requests)
    spent = cluster.run()
    return report(
        cluster.found,
        spent,
        system=system,
        seed=seed,
        ttft_target_ms=rules.ttft_ms,
        tbt_target_ms=rules.tbt_ms,
    )
