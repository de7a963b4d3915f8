"""What a placement is predicted to cost, worker by worker.

TTFT = queue + loading and computing + hand-over, or decode's wait if that is longer,
+ decode's first step (the sum of the paper's Algorithm 1, with the parts that follow the
prefill added). ``scoring`` has the same for columns of workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtide.kv import NodeRef, Tier
from kvtide.policy.curves import (
    CostSeeds,
    LoadCurve,
    PrefillCurve,
    load_curve,
    prefill_curve,
)
from kvtide.policy.rules import ReuseRule
from kvtide.policy.views import Ask, Copy, DecodeWorker, PrefillWorker

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Run:
    """So many blocks in a row that the same hosts hold, equally quick to read.

    ``holders``: by how much longer reading from a host takes than from its DRAM.
    """

    blocks: int
    holders: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """A run that may be loaded: ``block_ms`` each, from the loader's own host or not.

    ``only``: of all others, from this host alone.
    """

    run: Run
    block_ms: float
    near: bool
    only: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of a prefix to load, and how long that and computing the rest take.

    ``made_ms``: until both are done, in part at once. ``pending_blocks`` are loaded once
    the worker has computed them for another request.
    """

    blocks: int
    hit_tokens: int
    transfer_ms: float
    rest_tokens: int
    compute_ms: float
    made_ms: float
    pending_blocks: int = 0


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """``wait_ms`` until there is room, then ``tbt_ms`` between two tokens."""

    wait_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class Loader:
    """Who loads: its curves, where it is, and what it is loading already.

    ``pending_blocks`` as in ``PrefillWorker``; they are there ``pending_ms`` after all
    that waits there now.
    """

    host: str
    inflows: float
    curve: PrefillCurve
    loading: LoadCurve
    pending_blocks: int = 0
    pending_ms: float = 0.0


class CostModel:
    """Turns loads and curves into milliseconds. Stateless; estimates never negative."""

    def __init__(self, seeds: CostSeeds | None = None) -> None:
        """Use ``seeds`` where nothing was measured."""
        self.seeds = seeds or CostSeeds()

    def loader(self, worker: PrefillWorker) -> Loader:
        """What was fitted for its class, else what it reports, else the seeds."""
        curve = worker.curve or prefill_curve(worker.tokens_per_s, self.seeds)
        loading = worker.loading or load_curve(worker.load_bytes_per_s, self.seeds)
        pending_ms = max(0.0, worker.pending_ms - self.queue_ms(worker, curve))
        pending = worker.pending_blocks if worker.host else 0
        return Loader(worker.host, worker.inflows, curve, loading, pending, pending_ms)

    def queue_ms(self, worker: PrefillWorker, curve: PrefillCurve) -> float:
        """Until all that waits or runs there now is computed."""
        return worker.waiting_ms + worker.waiting_tokens * curve.token_ms

    def slowness(self, copy: Copy) -> float:
        """How much longer reading this copy takes than one in DRAM that is there."""
        slowness = 1.0
        if copy.located.slot.tier is Tier.SSD:
            slowness /= self.seeds.ssd_share
        if copy.hint:
            slowness /= self.seeds.hint_share
        return slowness

    def runs(self, ask: Ask) -> list[Run]:
        """The reusable blocks by who holds them, front to back.

        A plan ends where a run does: within one all blocks are equally quick to load,
        and the later ones save more than the earlier ones.
        """
        runs: list[Run] = []
        for copies in ask.prefix[: ask.reusable_blocks]:
            holders: dict[str, float] = {}
            for copy in copies:
                known = holders.get(copy.host, _NEVER)
                holders[copy.host] = min(known, self.slowness(copy))
            if runs and runs[-1].holders == holders:
                runs[-1] = Run(runs[-1].blocks + 1, holders)
            else:
                runs.append(Run(1, holders))
        return runs

    def near_ms(self, ask: Ask, loader: Loader, run: Run) -> float:
        """One block of ``run`` from the loader's own host.

        A node without a host shares memory with nobody: all is far from it.
        """
        slowness = run.holders.get(loader.host, _NEVER) if loader.host else _NEVER
        return self._block_ms(ask, loader.loading.near_byte_ms * slowness)

    def far_ms(
        self, ask: Ask, loader: Loader, run: Run, outflows: Mapping[str, float]
    ) -> float:
        """One block of ``run`` from all other hosts that hold it, at once.

        Each gives what its link has left; the loader's own link takes no more than it
        has left.
        """
        rate = sum(
            1 / (slowness * (1 + outflows.get(host, 0.0)))
            for host, slowness in run.holders.items()
            if host != loader.host or not host
        )
        if not rate:
            return _NEVER
        shared = max(1 + loader.inflows, 1 / rate)
        return self._block_ms(ask, loader.loading.far_byte_ms * shared)

    def from_ms(
        self,
        ask: Ask,
        loader: Loader,
        run: Run,
        source: str,
        outflows: Mapping[str, float],
    ) -> float:
        """One block of ``run`` from one other host."""
        alone = Run(run.blocks, {source: run.holders[source]})
        return self.far_ms(ask, loader, alone, outflows)

    def plan(
        self,
        ask: Ask,
        loader: Loader,
        loads: Sequence[Load],
        rule: ReuseRule,
    ) -> Plan:
        """Load these runs: all of them, or up to where it is cheapest.

        ``ReuseRule.CHEAPEST`` takes, of equally quick plans, the one that loads most.
        """
        best = self._plan(ask, loader, 0, 0.0)
        blocks, load_ms = 0, loader.loading.fixed_ms
        for load in loads:
            blocks += load.run.blocks
            load_ms += load.run.blocks * load.block_ms
            plan = self._plan(ask, loader, blocks, load_ms)
            if rule is not ReuseRule.CHEAPEST or plan.made_ms <= best.made_ms:
                best = plan
        return best

    def pending_plan(
        self, ask: Ask, loader: Loader, loads: Sequence[Load]
    ) -> Plan | None:
        """Load all these runs and what the worker is computing; None if that is nothing.

        It has to wait until that is there.
        """
        blocks = sum(load.run.blocks for load in loads)
        pending = min(loader.pending_blocks, ask.full_blocks - blocks)
        if pending <= 0:
            return None
        load_ms = loader.loading.fixed_ms
        load_ms += sum(load.run.blocks * load.block_ms for load in loads)
        load_ms += pending * self._block_ms(ask, loader.loading.near_byte_ms)
        plan = self._plan(ask, loader, blocks + pending, load_ms)
        return replace(
            plan,
            blocks=blocks,
            pending_blocks=pending,
            made_ms=plan.made_ms + loader.pending_ms,
        )

    def decode_cost(self, ask: Ask, worker: DecodeWorker) -> DecodeCost:
        """How long the request waits for room there, and the pace it then gets."""
        seeds = self.seeds
        ahead = worker.waiting + worker.booked
        running = max(0.0, worker.running + worker.coming)
        if worker.curve is not None:
            rows = max(0.0, running + ahead) + 1
            kv_tokens = max(0.0, worker.kv_tokens + worker.coming_kv_tokens)
            tbt_ms = worker.curve.ms(rows, kv_tokens + ask.prompt_tokens)
        else:
            share = (ahead + 1) / running if running else float(ahead)
            tbt_ms = (worker.step_ms or seeds.step_ms) * (1 + seeds.join_share * share)
        capacity = worker.kv_tokens_capacity
        full = capacity and worker.kv_tokens + ask.reserved_tokens > capacity
        turns = (worker.waiting + 1) if full else 0
        answer_ms = (ask.answer_tokens or seeds.answer_tokens) * tbt_ms
        return DecodeCost(turns * answer_ms / max(1, worker.running), tbt_ms)

    def handover_ms(
        self, prefill: NodeRef | None, host: str, decode: DecodeWorker
    ) -> float:
        """From the last layer's end until decode has verified it."""
        if prefill is None:
            return 0.0
        if prefill == decode.ref:
            return self.seeds.self_handover_ms
        if host == decode.host:
            return self.seeds.handover_ms
        return self.seeds.remote_handover_ms

    def _block_ms(self, ask: Ask, byte_ms: float) -> float:
        return ask.block_bytes * byte_ms + self.seeds.block_overhead_ms

    def _plan(self, ask: Ask, loader: Loader, blocks: int, load_ms: float) -> Plan:
        hit_tokens = blocks * ask.block_tokens
        rest_tokens = max(0, ask.kv_tokens - hit_tokens)
        transfer_ms = load_ms if blocks else 0.0
        compute_ms = loader.curve.ms(rest_tokens, hit_tokens)
        hidden_ms = self.seeds.overlap_share * min(transfer_ms, compute_ms)
        made_ms = transfer_ms + compute_ms - hidden_ms
        return Plan(blocks, hit_tokens, transfer_ms, rest_tokens, compute_ms, made_ms)
