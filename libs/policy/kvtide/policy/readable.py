"""Placement one worker at a time: what the policies mean, for people to read.

``scoring`` decides the same for thousands of workers; tests hold the two equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtide.policy.admission import Targets
from kvtide.policy.choices import (
    EXPLAINED_CANDIDATES,
    Candidate,
    Estimate,
    Placement,
    Refusal,
)
from kvtide.policy.cost import CostModel, DecodeCost, Load, Loader, Plan, Run
from kvtide.policy.curves import CostSeeds, LoadCurve, PrefillCurve, prefill_curve
from kvtide.policy.rules import PolicyRules, RankRule, ReuseRule, first_in_turn
from kvtide.policy.settling import (
    Ranking,
    no_decode,
    no_prefill,
    no_room,
    placement,
    summary,
    too_much,
)
from kvtide.policy.spreading import Option, spread
from kvtide.policy.views import Ask, Cluster, Copy, DecodeWorker, PrefillWorker


@dataclass(frozen=True, slots=True)
class _Decode:
    worker: DecodeWorker
    cost: DecodeCost


@dataclass(frozen=True, slots=True)
class _Found:
    """A candidate; ``loads`` are the runs that it could load."""

    prefill: PrefillWorker | None
    decode: _Decode
    loader: Loader
    loads: tuple[Load, ...]
    plan: Plan
    estimate: Estimate


class ReadablePolicy:
    """One of the policies; see ``PlacementPolicy``."""

    def __init__(
        self,
        rules: PolicyRules,
        seeds: CostSeeds | None = None,
        targets: Targets | None = None,
    ) -> None:
        """``rules`` of ``rules_of``."""
        self._rules = rules
        self._cost = CostModel(seeds)
        self._targets = targets or Targets()
        self._one_node = self
        if not rules.one_node:
            self._one_node = ReadablePolicy(rules.on_one_node(), seeds, targets)

    def place(self, ask: Ask, cluster: Cluster) -> Placement | Refusal:
        """See ``PlacementPolicy.place``."""
        if ask.one_node and not self._rules.one_node:
            return self._one_node.place(ask, cluster)
        decodes = self._fitting(ask, cluster)
        if isinstance(decodes, Refusal):
            return decodes
        if self._rules.one_node:
            cluster = _both(cluster, decodes)
        least = min(decodes, key=_decode_order)
        runs = self._cost.runs(ask)
        found = [
            self._paired(ask, cluster, worker, runs, least, decodes)
            for worker in cluster.prefills
        ]
        found += self._direct(ask, cluster, runs, least)
        if not found:
            return no_prefill()
        order = self._order(ask, found, len(cluster.prefills))
        shown = order[:EXPLAINED_CANDIDATES]
        rest = [each.estimate.ttft_ms for each in order[EXPLAINED_CANDIDATES:]]
        ranking = Ranking(
            tuple(each.estimate for each in shown), len(found), summary(rest)
        )
        refusal = too_much(ask, ranking, self._targets)
        if refusal is not None:
            return refusal
        chosen = self._candidate(ask, cluster, order[0])
        return placement(ask, self._rules, chosen, ranking)

    # ---- decode

    def _fitting(self, ask: Ask, cluster: Cluster) -> list[_Decode] | Refusal:
        workers = cluster.decodes
        if not workers:
            return no_decode()
        fitting = [
            worker
            for worker in workers
            if not 0 < worker.kv_tokens_capacity < ask.reserved_tokens
        ]
        if not fitting:
            return no_room(ask, max(worker.kv_tokens_capacity for worker in workers))
        return [_Decode(each, self._cost.decode_cost(ask, each)) for each in fitting]

    # ---- prefill

    def _paired(
        self,
        ask: Ask,
        cluster: Cluster,
        worker: PrefillWorker,
        runs: Sequence[Run],
        least: _Decode,
        decodes: Sequence[_Decode],
    ) -> _Found:
        """With the least loaded decode, or the best on its own host if that is better."""
        loader = self._cost.loader(worker)
        loads = self._loads(ask, cluster, loader, runs)
        plan = self._plan(ask, loader, loads)
        queue_ms = self._cost.queue_ms(worker, loader.curve)
        options = [least]
        if self._rules.one_node:
            options = [each for each in decodes if each.worker.ref == worker.ref]
        beside = [each for each in decodes if each.worker.host == worker.host]
        if self._rules.pairs and beside and worker.host:
            options.append(min(beside, key=lambda each: self._pace(ask, each)))
        found = [
            _Found(
                worker,
                decode,
                loader,
                loads,
                plan,
                self._estimate(ask, worker, decode, plan, queue_ms),
            )
            for decode in options
        ]
        return min(found, key=lambda each: self._completion(ask, each.estimate))

    def _plan(self, ask: Ask, loader: Loader, loads: Sequence[Load]) -> Plan:
        plan = self._cost.plan(ask, loader, loads, self._rules.reuse)
        if self._rules.pending:
            waiting = self._cost.pending_plan(ask, loader, loads)
            if waiting is not None and waiting.made_ms <= plan.made_ms:
                return waiting
        return plan

    def _loads(
        self, ask: Ask, cluster: Cluster, loader: Loader, runs: Sequence[Run]
    ) -> tuple[Load, ...]:
        """The runs that the policy's rule lets this worker load, and what each takes."""
        cost, outflows = self._cost, cluster.outflows
        if self._rules.reuse is ReuseRule.CHEAPEST:
            return tuple(self._cheaper(ask, cluster, loader, run) for run in runs)
        own = _held(runs, loader.host) if loader.host else 0
        loads = [
            Load(run, cost.near_ms(ask, loader, run), near=True) for run in runs[:own]
        ]
        best = self._longest(runs)
        if self._rules.reuse is ReuseRule.RATIO and best is not None:
            far = _held(runs, best)
            ratio = self._rules.balancing_ratio
            # no prefix of its own is an infinite ratio
            if _blocks(runs[:far]) > ratio * _blocks(runs[:own]):
                for run in runs[own:far]:
                    block_ms = cost.from_ms(ask, loader, run, best, outflows)
                    loads.append(Load(run, block_ms, near=False, only=best))
        return tuple(loads)

    def _cheaper(self, ask: Ask, cluster: Cluster, loader: Loader, run: Run) -> Load:
        near_ms = self._cost.near_ms(ask, loader, run)
        far_ms = self._cost.far_ms(ask, loader, run, cluster.outflows)
        return Load(run, min(near_ms, far_ms), near=near_ms <= far_ms)

    def _longest(self, runs: Sequence[Run]) -> str | None:
        """The host with the longest prefix, the first by name of equals."""
        hosts = sorted(runs[0].holders) if runs else []
        return max(
            hosts, key=lambda host: _blocks(runs[: _held(runs, host)]), default=None
        )

    def _direct(
        self, ask: Ask, cluster: Cluster, runs: Sequence[Run], decode: _Decode
    ) -> list[_Found]:
        """Decode alone, at the pace of the slowest prefill worker: it reports none.

        What it has to compute of other prompts comes first.
        """
        limit_tokens = self._rules.direct_blocks * ask.block_tokens
        if not self._rules.direct_blocks:
            return []
        seeds, cost = self._cost.seeds, self._cost
        known = [cost.loader(worker).curve.token_ms for worker in cluster.prefills]
        seed_ms = prefill_curve(0.0, seeds).token_ms
        curve = PrefillCurve(0.0, max(known, default=seed_ms), 0.0)
        loading = LoadCurve.at(seeds.load_bytes_per_s, seeds.remote_share)
        loader = Loader(decode.worker.host, 0.0, curve, loading)
        loads = self._loads(ask, cluster, loader, runs)
        plan = cost.plan(ask, loader, loads, self._rules.reuse)
        if plan.rest_tokens > limit_tokens:
            return []
        queue_ms = 0.0
        if plan.rest_tokens:
            fills = decode.worker.fill_tokens
            queue_ms = cost.seeds.fill_ms(fills, decode.cost.tbt_ms)
        estimate = self._estimate(ask, None, decode, plan, queue_ms)
        return [_Found(None, decode, loader, loads, plan, estimate)]

    # ---- both

    def _estimate(
        self,
        ask: Ask,
        prefill: PrefillWorker | None,
        decode: _Decode,
        plan: Plan,
        queue_ms: float,
    ) -> Estimate:
        ref = prefill.ref if prefill is not None else None
        host = prefill.host if prefill is not None else ""
        made_ms = queue_ms + plan.made_ms
        made_ms += self._cost.handover_ms(ref, host, decode.worker)
        # decode waits for room while prefill works
        ttft_ms = max(made_ms, decode.cost.wait_ms) + decode.cost.tbt_ms
        if ask.lateness is not None:
            ttft_ms = ask.lateness.ttft_ms(queue_ms, ttft_ms)
        return Estimate(
            prefill=ref.node if ref is not None else decode.worker.ref.node,
            decode=decode.worker.ref.node,
            hit_tokens=plan.hit_tokens,
            queue_ms=queue_ms,
            transfer_ms=plan.transfer_ms,
            prefill_ms=plan.compute_ms,
            ttft_ms=ttft_ms,
            tbt_ms=decode.cost.tbt_ms,
            wait_ms=decode.cost.wait_ms,
        )

    def _order(self, ask: Ask, found: Sequence[_Found], workers: int) -> list[_Found]:
        rank = self._rules.rank
        if rank in {RankRule.SHUFFLED, RankRule.IN_TURN}:
            first = first_in_turn(self._rules, ask.turn, workers)
            return [*found[first:], *found[:first]]
        if rank is RankRule.QUEUE:
            return sorted(found, key=lambda each: each.estimate.queue_ms)
        if rank is RankRule.FIRST_TOKEN:
            return sorted(found, key=lambda each: each.estimate.ttft_ms)
        return sorted(found, key=lambda each: self._completion(ask, each.estimate))

    def _completion(self, ask: Ask, estimate: Estimate) -> float:
        """When the whole answer would be there."""
        return estimate.ttft_ms + self._answer_tokens(ask) * estimate.tbt_ms

    def _pace(self, ask: Ask, decode: _Decode) -> float:
        return decode.cost.wait_ms + self._answer_tokens(ask) * decode.cost.tbt_ms

    def _answer_tokens(self, ask: Ask) -> float:
        return ask.answer_tokens or self._cost.seeds.answer_tokens

    # ---- the copies

    def _candidate(self, ask: Ask, cluster: Cluster, found: _Found) -> Candidate:
        blocks: list[list[Option[Copy]]] = []
        for load in found.loads:
            count = min(load.run.blocks, found.plan.blocks - len(blocks))
            for _ in range(count):
                copies = ask.prefix[len(blocks)]
                options = self._options(cluster, found.loader.host, load, copies)
                blocks.append(options)
        prefill = found.prefill
        return Candidate(
            prefill=prefill.ref if prefill is not None else None,
            decode=found.decode.worker.ref,
            reuse=tuple(copy.located for copy in spread(blocks)),
            rest_tokens=found.plan.rest_tokens,
            estimate=found.estimate,
        )

    def _options(
        self, cluster: Cluster, own: str, load: Load, copies: Sequence[Copy]
    ) -> list[Option[Copy]]:
        """The quickest copy on each host that the block is loaded from."""
        options: dict[str, Option[Copy]] = {}
        for copy in copies:
            slowness = self._cost.slowness(copy)
            local = copy.host == own and bool(own)
            far = not local if load.only is None else copy.host == load.only
            wanted = local if load.near else far
            quickest = slowness <= load.run.holders[copy.host]
            if wanted and quickest and copy.host not in options:
                cost = slowness * (1 + cluster.outflows.get(copy.host, 0.0))
                options[copy.host] = Option(copy.host, cost, copy)
        return [options[host] for host in sorted(options)]


def _both(cluster: Cluster, decodes: Sequence[_Decode]) -> Cluster:
    """Without prefill workers that are none of these decode workers."""
    able = {each.worker.ref for each in decodes}
    prefills = tuple(each for each in cluster.prefills if each.ref in able)
    return replace(cluster, prefills=prefills)


def _decode_order(decode: _Decode) -> tuple[float, float, float, int]:
    worker = decode.worker
    capacity = worker.kv_tokens_capacity
    return (
        decode.cost.wait_ms,
        decode.cost.tbt_ms,
        worker.kv_tokens / capacity if capacity else 0.0,
        worker.kv_tokens,
    )


def _held(runs: Sequence[Run], host: str) -> int:
    """How many of the first runs a host holds."""
    return next((n for n, run in enumerate(runs) if host not in run.holders), len(runs))


def _blocks(runs: Sequence[Run]) -> int:
    return sum(run.blocks for run in runs)
