"""The default policy: the pair of workers with the smallest time to first token."""

from collections.abc import Sequence

from kvtide.policy.candidates import (
    ChosenDecode,
    candidate,
    direct_candidate,
    least_loaded,
    settle,
)
from kvtide.policy.choices import Candidate, Placement, Refusal, Targets
from kvtide.policy.cost import CostModel, CostSeeds, Rates, Routes
from kvtide.policy.views import Ask, Cluster, PrefillWorker


class LeastTtft:
    """Smallest predicted time to first token: any prefill with the best decode.

    The prefix that each worker reuses is the one that makes loading plus computing
    shortest for it. Where decode has to compute no more than ``direct_blocks`` blocks
    itself (the pool has the rest, or the prompt is that short) decode alone is a
    candidate too: its first step then takes the missing suffix with it.
    """

    def __init__(
        self,
        seeds: CostSeeds | None = None,
        targets: Targets | None = None,
        *,
        direct_blocks: int = 1,
    ) -> None:
        """``direct_blocks`` of 0 makes every uncached token go to a prefill worker."""
        self._cost = CostModel(seeds)
        self._targets = targets or Targets()
        self._direct_blocks = direct_blocks

    def place(self, ask: Ask, cluster: Cluster) -> Placement | Refusal:
        """See ``PlacementPolicy.place``."""
        decode = least_loaded(self._cost, ask, cluster.decodes)
        if isinstance(decode, Refusal):
            return decode
        routes = Routes(self._cost, ask)
        found = [
            self._prefilled(ask, worker, routes, decode) for worker in cluster.prefills
        ]
        found += self._direct(ask, cluster.prefills, routes, decode)
        return settle(ask, found, self._targets)

    def _prefilled(
        self, ask: Ask, worker: PrefillWorker, routes: Routes, decode: ChosenDecode
    ) -> Candidate:
        rates = self._cost.rates(worker)
        plan = self._cost.best_reuse(ask, routes.to(worker.host), rates)
        return candidate(self._cost, worker, rates, decode, plan)

    def _direct(
        self,
        ask: Ask,
        workers: Sequence[PrefillWorker],
        routes: Routes,
        decode: ChosenDecode,
    ) -> list[Candidate]:
        """Decode alone, at the pace of the prefill workers: it reports none itself."""
        if self._direct_blocks * ask.block_tokens < ask.kv_tokens - (
            ask.reusable_blocks * ask.block_tokens
        ):
            return []
        known = [worker.tokens_per_s for worker in workers if worker.tokens_per_s]
        pace = min(known, default=self._cost.seeds.tokens_per_s)
        rates = Rates(pace, self._cost.seeds.load_bytes_per_s)
        plan = self._cost.best_reuse(ask, routes.to(decode.worker.host), rates)
        if plan.rest_tokens > self._direct_blocks * ask.block_tokens:
            return []
        return [direct_candidate(decode, plan)]
