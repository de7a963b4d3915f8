"""Algorithm 1 of Mooncake (FAST'25), as published, for comparison.

For each prefill instance: if the best prefix anywhere is longer than its own by more
than the balancing ratio, the difference is transferred to it; else its own prefix is
used without any transfer. Queue + transfer + prefill is then smallest at the chosen
one. The paper publishes no value for the ratio ("currently adjusted manually").
"""

from kvtide.policy.candidates import ChosenDecode, candidate, least_loaded, settle
from kvtide.policy.choices import Candidate, Placement, Refusal, Targets
from kvtide.policy.cost import CostModel, CostSeeds, Routes
from kvtide.policy.views import Ask, Cluster, Copy, PrefillWorker


class BalancingRatio:
    """The paper's policy. An instance's own prefix is what its host's store has."""

    def __init__(
        self,
        seeds: CostSeeds | None = None,
        targets: Targets | None = None,
        *,
        balancing_ratio: float = 2.0,
    ) -> None:
        """``balancing_ratio`` is the paper's kvcache_balancing_threshold."""
        self._cost = CostModel(seeds)
        self._targets = targets or Targets()
        self._ratio = balancing_ratio

    def place(self, ask: Ask, cluster: Cluster) -> Placement | Refusal:
        """See ``PlacementPolicy.place``."""
        decode = least_loaded(self._cost, ask, cluster.decodes)
        if isinstance(decode, Refusal):
            return decode
        routes = Routes(self._cost, ask)
        found = [
            self._candidate(ask, worker, routes, decode) for worker in cluster.prefills
        ]
        return settle(ask, found, self._targets)

    def _candidate(
        self, ask: Ask, worker: PrefillWorker, routes: Routes, decode: ChosenDecode
    ) -> Candidate:
        own = self._own_prefix(ask, worker.host)
        best_len = ask.reusable_blocks
        copies = own
        # no prefix of its own is an infinite ratio
        if best_len > self._ratio * len(own):
            rest = ask.prefix[len(own) : best_len]
            copies = own + [block[0] for block in rest]
        rates = self._cost.rates(worker)
        plan = self._cost.whole_reuse(ask, routes.through(copies, worker.host), rates)
        return candidate(self._cost, worker, rates, decode, plan)

    def _own_prefix(self, ask: Ask, host: str) -> list[Copy]:
        own: list[Copy] = []
        for copies in ask.prefix[: ask.reusable_blocks]:
            here = next((copy for copy in copies if copy.host == host and host), None)
            if here is None:
                break
            own.append(here)
        return own
