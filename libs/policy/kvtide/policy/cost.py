"""What a placement is predicted to cost, from the rates that workers report.

TTFT = queue + transfer + prefill + hand-over + decode's wait + its first step (the sum
of the paper's Algorithm 1, with the parts that follow the prefill added). Loading and
computing overlap in part, so this errs on the long side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.kv import Located, Tier
from kvtide.policy.views import Ask, Copy, DecodeWorker, PrefillWorker

_S_TO_MS = 1000.0


@dataclass(frozen=True, slots=True)
class CostSeeds:
    """What is assumed until a worker has measured it.

    The defaults are those of a small model on a few CPU cores. ``remote_share`` and
    ``ssd_share`` are the speed of a copy on another host, or on SSD, as a share of
    that of a copy in this host's memory. ``join_share`` is by how much of a batch's
    step one more request in a batch of one makes it longer. ``answer_tokens`` is the
    length that an answer is assumed to have when room must be waited for.
    """

    tokens_per_s: float = 1000.0
    load_bytes_per_s: float = 1e9
    remote_share: float = 0.25
    ssd_share: float = 0.25
    block_overhead_ms: float = 0.2
    handover_ms: float = 3.0
    remote_handover_ms: float = 8.0
    step_ms: float = 30.0
    join_share: float = 0.3
    answer_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which copies to load, in block order, and how long loading and the rest take."""

    located: tuple[Located, ...]
    hit_tokens: int
    transfer_ms: float
    rest_tokens: int
    compute_ms: float


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """``wait_ms`` until there is room, then ``tbt_ms`` between two tokens."""

    wait_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one worker computes and loads; always positive."""

    tokens_per_s: float
    load_bytes_per_s: float


class CostModel:
    """Turns loads and rates into milliseconds. Stateless; estimates never negative."""

    def __init__(self, seeds: CostSeeds | None = None) -> None:
        """Use ``seeds`` where nothing was measured."""
        self.seeds = seeds or CostSeeds()

    def rates(self, worker: PrefillWorker) -> Rates:
        """What the worker reported, or the seeds."""
        return Rates(
            worker.tokens_per_s or self.seeds.tokens_per_s,
            worker.load_bytes_per_s or self.seeds.load_bytes_per_s,
        )

    def queue_ms(self, worker: PrefillWorker) -> float:
        """Until all that waits or runs there now is computed."""
        return worker.waiting_tokens / self.rates(worker).tokens_per_s * _S_TO_MS

    def load_ms(self, ask: Ask, copy: Copy, host: str, rates: Rates) -> float:
        """One block from this copy into a worker on ``host``."""
        rate = rates.load_bytes_per_s
        if copy.host != host:
            rate *= self.seeds.remote_share
        if copy.located.slot.tier is Tier.SSD:
            rate *= self.seeds.ssd_share
        return ask.block_bytes / rate * _S_TO_MS + self.seeds.block_overhead_ms

    def best_reuse(self, ask: Ask, host: str, rates: Rates) -> Reuse:
        """The prefix that makes loading plus computing shortest, on equality the longest.

        Each block comes from its cheapest copy. Where the network is slow and the
        worker fast, computing beats loading: then the prefix is shorter than what the
        pool has, or empty.
        """
        return self._shortest(ask, self._cheapest(ask, host, rates), rates)

    def reuse_of(
        self, ask: Ask, copies: Sequence[Copy], host: str, rates: Rates
    ) -> Reuse:
        """The cost of loading exactly these blocks, one copy each, and the rest."""
        loads = [self.load_ms(ask, copy, host, rates) for copy in copies]
        return self._reuse(ask, copies, sum(loads), rates)

    def decode_cost(self, ask: Ask, worker: DecodeWorker) -> DecodeCost:
        """How long the request waits for room there, and the pace it then gets."""
        step_ms = worker.step_ms or self.seeds.step_ms
        ahead = worker.waiting + worker.booked
        if worker.running:
            step_ms *= 1 + self.seeds.join_share * (ahead + 1) / worker.running
        else:
            step_ms *= 1 + self.seeds.join_share * ahead
        capacity = worker.kv_tokens_capacity
        full = capacity and worker.kv_tokens + ask.reserved_tokens > capacity
        turns = (worker.waiting + 1) if full else 0
        answer_ms = self.seeds.answer_tokens * step_ms
        return DecodeCost(turns * answer_ms / max(1, worker.running), step_ms)

    def handover_ms(self, prefill_host: str, decode_host: str) -> float:
        """From the last layer's end until decode has verified it."""
        if prefill_host == decode_host:
            return self.seeds.handover_ms
        return self.seeds.remote_handover_ms

    def _cheapest(self, ask: Ask, host: str, rates: Rates) -> list[tuple[float, Copy]]:
        best: list[tuple[float, Copy]] = []
        for copies in ask.prefix[: ask.reusable_blocks]:
            costs = [(self.load_ms(ask, copy, host, rates), copy) for copy in copies]
            best.append(min(costs, key=lambda cost: cost[0]))
        return best

    def _shortest(
        self, ask: Ask, loads: Sequence[tuple[float, Copy]], rates: Rates
    ) -> Reuse:
        saved_ms = ask.block_tokens / rates.tokens_per_s * _S_TO_MS
        transfer_ms = gain_ms = best_gain_ms = best_transfer_ms = 0.0
        length = 0
        for number, (cost_ms, _) in enumerate(loads, start=1):
            transfer_ms += cost_ms
            gain_ms += saved_ms - cost_ms
            if gain_ms >= best_gain_ms:
                length, best_gain_ms = number, gain_ms
                best_transfer_ms = transfer_ms
        copies = [copy for _, copy in loads[:length]]
        return self._reuse(ask, copies, best_transfer_ms, rates)

    def _reuse(
        self, ask: Ask, copies: Sequence[Copy], transfer_ms: float, rates: Rates
    ) -> Reuse:
        rest_tokens = max(0, ask.kv_tokens - len(copies) * ask.block_tokens)
        return Reuse(
            located=tuple(copy.located for copy in copies),
            hit_tokens=len(copies) * ask.block_tokens,
            transfer_ms=transfer_ms,
            rest_tokens=rest_tokens,
            compute_ms=rest_tokens / rates.tokens_per_s * _S_TO_MS,
        )
