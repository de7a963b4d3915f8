"""Placement of a request among thousands of workers: ``readable`` in columns."""

from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from kvtide.kv import NodeRef
from kvtide.policy.admission import Targets
from kvtide.policy.choices import (
    EXPLAINED_CANDIDATES,
    Candidate,
    Estimate,
    Placement,
    Refusal,
    RestSummary,
)
from kvtide.policy.columns import (
    NO_HOST,
    Flags,
    Fleet,
    Floats,
    Holdings,
    Ints,
    PrefillColumns,
)
from kvtide.policy.curves import CostSeeds, prefill_curve
from kvtide.policy.decode_columns import DecodeScores, best_by_host
from kvtide.policy.loading_columns import HeldRuns, LoaderColumns
from kvtide.policy.rules import PolicyRules, RankRule, ReuseRule, first_in_turn
from kvtide.policy.settling import (
    Ranking,
    no_decode,
    no_prefill,
    no_room,
    placement,
    too_much,
)
from kvtide.policy.views import Ask


@dataclass(frozen=True, slots=True)
class _Plans:
    """How much each loader loads; ``near``: which runs it loads from its own host.

    ``blocks`` are of the pool, ``pending`` those that the loader computes for others.
    """

    near: Flags
    only: int | None
    blocks: Ints
    rest_tokens: Ints
    transfer_ms: Floats
    compute_ms: Floats
    made_ms: Floats
    pending: Ints


@dataclass(frozen=True, slots=True)
class _Scores:
    """Each candidate's estimate. ``decode`` is a row of the decode workers."""

    decode: Ints
    queue_ms: Floats
    ttft_ms: Floats
    tbt_ms: Floats
    wait_ms: Floats


class ColumnPolicy:
    """One of the policies, for a fleet in columns."""

    def __init__(
        self,
        rules: PolicyRules,
        seeds: CostSeeds | None = None,
        targets: Targets | None = None,
    ) -> None:
        """``rules`` of ``rules_of``."""
        self.rules = rules
        self.seeds = seeds or CostSeeds()
        self.targets = targets or Targets()
        self._one_node = self
        if not rules.one_node:
            self._one_node = ColumnPolicy(rules.on_one_node(), seeds, targets)

    def place(self, ask: Ask, holdings: Holdings, fleet: Fleet) -> Placement | Refusal:
        """As ``PlacementPolicy.place``; ``ask.prefix`` is not looked at."""
        policy = self._one_node if ask.one_node else self
        return policy._decide(ask, holdings, fleet)  # noqa: SLF001 - its own kind

    def _decide(
        self, ask: Ask, holdings: Holdings, fleet: Fleet
    ) -> Placement | Refusal:
        decodes = fleet.decodes
        if not len(decodes.refs):
            return no_decode()
        scored = DecodeScores.of(ask, decodes, self.seeds)
        if not scored.fits.any():
            return no_room(ask, int(decodes.capacity.max()))
        least = scored.least(decodes)
        if self.rules.one_node:
            fleet = _with_decode(fleet, scored.fits)
        runs = HeldRuns(ask, holdings, fleet.outflows, self.seeds)
        loaders = self._loaders(fleet.prefills, int(decodes.host[least]))
        if not len(loaders.host):
            return no_prefill()
        plans = self._plans(ask, loaders, runs)
        if self.rules.pending and fleet.prefills.pending_blocks.any():
            whole = int(runs.ends[-1]) == min(holdings.blocks, ask.full_blocks)
            if whole:
                plans = self._waiting(ask, fleet.prefills, loaders, runs, plans)
        scores = self._scores(ask, fleet, scored, least, plans)
        first, considered = self._first(ask, scores, plans, len(fleet.prefills.refs))
        if not considered:
            return no_prefill()
        ranking = _ranking(ask, fleet, scores, plans, first, considered)
        refusal = too_much(ask, ranking, self.targets)
        if refusal is not None:
            return refusal
        best = int(first[0])
        blocks = int(plans.blocks[best])
        own = int(runs.places(loaders.host[best : best + 1])[0])
        rows = runs.spread(own, plans.near[:, best], plans.only, blocks)
        chosen = Candidate(
            prefill=_prefill(fleet.prefills, best),
            decode=decodes.refs[int(scores.decode[best])],
            reuse=tuple(map(holdings.located, rows)),
            rest_tokens=int(plans.rest_tokens[best]),
            estimate=ranking.estimates[0],
        )
        return placement(ask, self.rules, chosen, ranking)

    # ---- loading and computing

    def _loaders(self, prefills: PrefillColumns, decode_host: int) -> LoaderColumns:
        """The prefill workers, and decode itself where the policy lets it compute."""
        columns = (
            prefills.inflows,
            prefills.fixed_ms,
            prefills.token_ms,
            prefills.pair_ms,
            prefills.load_fixed_ms,
            prefills.near_byte_ms,
            prefills.far_byte_ms,
        )
        if not self.rules.direct_blocks:
            return LoaderColumns(prefills.host, *columns)
        seeds = self.seeds
        # at the pace of the slowest prefill worker, for decode reports none
        token_ms = prefill_curve(0.0, seeds).token_ms
        if len(prefills.refs):
            token_ms = float(prefills.token_ms.max())
        near = 1000.0 / seeds.load_bytes_per_s
        far = near / seeds.remote_share
        longer = np.empty((len(columns), len(prefills.refs) + 1))
        for row, column in zip(longer, columns, strict=True):
            row[:-1] = column
        longer[:, -1] = (0.0, 0.0, token_ms, 0.0, 0.0, near, far)
        host = np.empty(longer.shape[1], dtype=np.int64)
        host[:-1], host[-1] = prefills.host, decode_host
        return LoaderColumns(host, *longer)

    def _plans(self, ask: Ask, loaders: LoaderColumns, runs: HeldRuns) -> _Plans:
        places = runs.places(loaders.host)
        near_ms = runs.near_ms(loaders, places)
        only: int | None = None
        if self.rules.reuse is ReuseRule.CHEAPEST:
            far_ms = runs.far_ms(loaders, places)
            near = near_ms <= far_ms
            loads_ms = np.minimum(near_ms, far_ms)
            taken = None
        else:
            taken = runs.held(places)
            near = np.arange(len(runs))[:, None] < taken
            loads_ms = near_ms
            only = runs.longest()
            if self.rules.reuse is ReuseRule.RATIO and only is not None:
                ends = runs.ends
                far = int(runs.held(np.array([only]))[0])
                fetch = ends[far] > self.rules.balancing_ratio * ends[taken]
                taken = np.where(fetch, far, taken)
                loads_ms = np.where(near, near_ms, runs.from_ms(loaders, only))
        return self._chosen(ask, loaders, runs, loads_ms, near, only, taken)

    def _chosen(
        self,
        ask: Ask,
        loaders: LoaderColumns,
        runs: HeldRuns,
        loads_ms: Floats,
        near: Flags,
        only: int | None,
        taken: Ints | None,
    ) -> _Plans:
        """The time of each plan (a row more than runs), and each loader's choice."""
        ends = runs.ends
        hits = ends * ask.block_tokens
        rest = np.maximum(0, ask.kv_tokens - hits)
        compute_ms = loaders.compute_ms(rest[:, None], hits[:, None])
        transfer_ms = np.empty(compute_ms.shape)
        transfer_ms[0] = 0.0
        load_ms = loaders.load_fixed_ms
        for run, count in enumerate(runs.counts):
            load_ms = load_ms + loads_ms[run] * count
            transfer_ms[run + 1] = load_ms
        made_ms = transfer_ms + compute_ms
        if self.seeds.overlap_share:
            hidden_ms = np.minimum(transfer_ms, compute_ms)
            made_ms -= self.seeds.overlap_share * hidden_ms
        if taken is None:
            # of equals the one that loads most
            taken = np.zeros(len(loaders.host), dtype=np.int64)
            least_ms = made_ms[0].copy()
            for run in range(1, len(made_ms)):
                better = made_ms[run] <= least_ms
                taken[better] = run
                np.minimum(least_ms, made_ms[run], out=least_ms)
        count = len(loaders.host)
        cell = taken * count + np.arange(count)
        return _Plans(
            near=near,
            only=only if self.rules.reuse is ReuseRule.RATIO else None,
            blocks=ends.take(taken),
            rest_tokens=rest.take(taken),
            transfer_ms=transfer_ms.take(cell),
            compute_ms=compute_ms.take(cell),
            made_ms=made_ms.take(cell),
            pending=np.zeros(count, dtype=np.int64),
        )

    def _waiting(
        self,
        ask: Ask,
        prefills: PrefillColumns,
        loaders: LoaderColumns,
        runs: HeldRuns,
        plans: _Plans,
    ) -> _Plans:
        """With what is being computed there for others, where that is no slower."""
        near, others = plans.near, len(loaders.host) - len(prefills.refs)
        pending = np.where(prefills.host != NO_HOST, prefills.pending_blocks, 0)
        pending = np.pad(pending, (0, others))
        ends = int(runs.ends[-1])
        pending = np.clip(pending, 0, max(0, ask.full_blocks - ends))
        hits = (ends + pending) * ask.block_tokens
        rest = np.maximum(0, ask.kv_tokens - hits)
        compute_ms = loaders.compute_ms(rest, hits)
        transfer_ms = runs.all_ms(loaders, near) + pending * runs.pending_ms(loaders)
        late_ms = np.maximum(0.0, prefills.pending_ms - _queue_ms(prefills))
        made_ms = transfer_ms + compute_ms + np.pad(late_ms, (0, others))
        made_ms -= self.seeds.overlap_share * np.minimum(transfer_ms, compute_ms)
        better = (pending > 0) & (made_ms <= plans.made_ms)
        return _Plans(
            near=near,
            only=plans.only,
            blocks=np.where(better, ends, plans.blocks),
            rest_tokens=np.where(better, rest, plans.rest_tokens),
            transfer_ms=np.where(better, transfer_ms, plans.transfer_ms),
            compute_ms=np.where(better, compute_ms, plans.compute_ms),
            made_ms=np.where(better, made_ms, plans.made_ms),
            pending=np.where(better, pending, 0),
        )

    # ---- candidates

    def _scores(
        self,
        ask: Ask,
        fleet: Fleet,
        decodes: DecodeScores,
        least: int,
        plans: _Plans,
    ) -> _Scores:
        prefills = fleet.prefills
        workers, candidates = len(prefills.refs), len(plans.made_ms)
        queue_ms = np.zeros(candidates)
        queue_ms[:workers] = _queue_ms(prefills)
        if candidates > workers and plans.rest_tokens[workers]:
            # decode alone, after what it has to compute anyway
            fills, tbt_ms = fleet.decodes.fill_tokens[least], decodes.tbt_ms[least]
            queue_ms[workers:] = self.seeds.fill_ms(float(fills), float(tbt_ms))
        made_ms = queue_ms + plans.made_ms
        decode = np.empty(candidates, dtype=np.int64)
        decode.fill(least)
        if self.rules.one_node:
            decode = _beside(fleet)
        if not self.rules.pairs or not workers:
            return self._with(ask, fleet, decodes, decode, queue_ms, made_ms)
        answer_tokens = self._answer_tokens(ask)
        pace = decodes.wait_ms + answer_tokens * decodes.tbt_ms
        pace[~decodes.fits] = np.inf
        beside = best_by_host(fleet.decodes.host, pace, len(fleet.outflows))
        there = beside.take(prefills.host)
        there[prefills.host == NO_HOST] = -1
        paired = there >= 0
        found = self._with(ask, fleet, decodes, decode, queue_ms, made_ms)
        if not paired.any():
            return found
        decode = decode.copy()
        np.copyto(decode[:workers], there, where=paired)
        other = self._with(ask, fleet, decodes, decode, queue_ms, made_ms)
        better = other.ttft_ms + answer_tokens * other.tbt_ms < (
            found.ttft_ms + answer_tokens * found.tbt_ms
        )
        return _Scores(
            decode=np.where(better, other.decode, found.decode),
            queue_ms=queue_ms,
            ttft_ms=np.where(better, other.ttft_ms, found.ttft_ms),
            tbt_ms=np.where(better, other.tbt_ms, found.tbt_ms),
            wait_ms=np.where(better, other.wait_ms, found.wait_ms),
        )

    def _with(
        self,
        ask: Ask,
        fleet: Fleet,
        decodes: DecodeScores,
        decode: Ints,
        queue_ms: Floats,
        made_ms: Floats,
    ) -> _Scores:
        """The scores of each candidate with its decode worker."""
        seeds, prefills = self.seeds, fleet.prefills
        workers = len(prefills.refs)
        partner = decode[:workers]
        handover_ms = np.zeros(len(decode))
        own = handover_ms[:workers]
        own.fill(seeds.remote_handover_ms)
        own[fleet.decodes.host.take(partner) == prefills.host] = seeds.handover_ms
        own[fleet.decodes.node.take(partner) == prefills.node] = seeds.self_handover_ms
        wait_ms, tbt_ms = decodes.wait_ms.take(decode), decodes.tbt_ms.take(decode)
        # decode waits for room while prefill works
        ttft_ms = np.maximum(made_ms + handover_ms, wait_ms) + tbt_ms
        if ask.lateness is not None:
            ttft_ms = ask.lateness.ttft_ms(queue_ms, ttft_ms)
        return _Scores(decode, queue_ms, ttft_ms, tbt_ms, wait_ms)

    def _first(
        self, ask: Ask, scores: _Scores, plans: _Plans, workers: int
    ) -> tuple[Ints, int]:
        """The best candidates, best first, and how many there are: the first rows."""
        rank, limit = self.rules.rank, EXPLAINED_CANDIDATES
        if rank in {RankRule.SHUFFLED, RankRule.IN_TURN}:
            turn = first_in_turn(self.rules, ask.turn, workers) if workers else 0
            rows = np.arange(turn, turn + min(limit, workers), dtype=np.int64)
            return rows % max(1, workers), workers
        if rank is RankRule.QUEUE:
            return _least(scores.queue_ms, limit), len(scores.queue_ms)
        if rank is RankRule.FIRST_TOKEN:
            return _least(scores.ttft_ms, limit), len(scores.ttft_ms)
        done_ms = scores.ttft_ms + self._answer_tokens(ask) * scores.tbt_ms
        limit_tokens = self.rules.direct_blocks * ask.block_tokens
        if self.rules.direct_blocks and plans.rest_tokens[workers] > limit_tokens:
            done_ms = done_ms[:workers]
        return _least(done_ms, limit), len(done_ms)

    def _answer_tokens(self, ask: Ask) -> float:
        return ask.answer_tokens or self.seeds.answer_tokens


def _with_decode(fleet: Fleet, fits: Flags) -> Fleet:
    """Without prefill workers that are no decode worker which the request fits."""
    there = np.isin(fleet.prefills.node, fleet.decodes.node[fits])
    return replace(fleet, prefills=fleet.prefills.take(there.nonzero()[0]))


def _beside(fleet: Fleet) -> Ints:
    """The decode row of each prefill worker, which is one too."""
    order = fleet.decodes.node.argsort(kind="stable")
    return order[fleet.decodes.node[order].searchsorted(fleet.prefills.node)]


def _queue_ms(prefills: PrefillColumns) -> Floats:
    return prefills.waiting_ms + prefills.waiting_tokens * prefills.token_ms


def _least(values: Floats, count: int) -> Ints:
    """The rows of the least values, least first; of equals the first."""
    if count >= len(values):
        return values.argsort(kind="stable")
    parted = values.copy()
    parted.partition(count - 1)
    bound = float(parted[count - 1])
    if isnan(bound):
        return values.argsort(kind="stable")[:count]
    rows = (values <= bound).nonzero()[0]
    order = values.take(rows).argsort(kind="stable")
    return rows.take(order[:count])


def _ranking(
    ask: Ask,
    fleet: Fleet,
    scores: _Scores,
    plans: _Plans,
    shown: Ints,
    considered: int,
) -> Ranking:
    estimates = _estimates(ask, fleet, scores, plans, shown)
    others = np.ones(considered, dtype=bool)
    others[shown] = False
    rest = scores.ttft_ms[:considered][others]
    rest.sort()
    summary = None
    if rest.size:
        middle = float(rest[rest.size // 2])
        summary = RestSummary(rest.size, float(rest[0]), middle, float(rest[-1]))
    return Ranking(estimates, considered, summary)


def _estimates(
    ask: Ask, fleet: Fleet, scores: _Scores, plans: _Plans, rows: Ints
) -> tuple[Estimate, ...]:
    """Those candidates as people see them."""
    decode: list[int] = scores.decode.take(rows).tolist()
    blocks: list[int] = (plans.blocks + plans.pending).take(rows).tolist()
    times_ms = zip(
        scores.queue_ms.take(rows).tolist(),
        plans.transfer_ms.take(rows).tolist(),
        plans.compute_ms.take(rows).tolist(),
        scores.ttft_ms.take(rows).tolist(),
        scores.tbt_ms.take(rows).tolist(),
        scores.wait_ms.take(rows).tolist(),
        strict=True,
    )
    estimates: list[Estimate] = []
    shown: list[int] = rows.tolist()
    for at, (row, times) in enumerate(zip(shown, times_ms, strict=True)):
        partner = fleet.decodes.refs[decode[at]]
        maker = _prefill(fleet.prefills, row) or partner
        hit_tokens = blocks[at] * ask.block_tokens
        estimates.append(Estimate(maker.node, partner.node, hit_tokens, *times))
    return tuple(estimates)


def _prefill(prefills: PrefillColumns, row: int) -> NodeRef | None:
    """The worker of a candidate; None is decode alone."""
    return prefills.refs[row] if row < len(prefills.refs) else None
