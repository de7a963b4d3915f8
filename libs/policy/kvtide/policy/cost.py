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
_LEAST_TOKENS_PER_S = 0.01
"""Keeps estimates finite, whatever a worker reports."""


@dataclass(frozen=True, slots=True)
class CostSeeds:
    """What is assumed until a worker has measured it.

    The defaults are those of a small model on a few CPU cores. ``remote_share`` and
    ``ssd_share`` are the speed of a copy on another host, or on SSD, as a share of
    that of a copy in this host's memory. ``join_share`` is by how much of a batch's
    step one more request in a batch of one makes it longer. ``answer_tokens`` is the
    length that an answer is assumed to have when room must be waited for.

    A load rate below ``least_load_share`` of the assumed one is taken for that share: a
    worker whose first loads went badly would else never be given a load again, and so
    never measure a better rate.
    """

    tokens_per_s: float = 1000.0
    load_bytes_per_s: float = 1e9
    least_load_share: float = 0.1
    remote_share: float = 0.25
    ssd_share: float = 0.25
    block_overhead_ms: float = 0.2
    handover_ms: float = 3.0
    remote_handover_ms: float = 8.0
    step_ms: float = 30.0
    join_share: float = 0.3
    answer_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Run:
    """So many blocks in a row whose copies are equally slow to load."""

    slowness: float
    blocks: int


@dataclass(frozen=True, slots=True)
class Route:
    """One copy for each block of a prefix, in order, as seen from one host."""

    copies: tuple[Copy, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a route to load, and how long loading and the rest take."""

    route: Route
    blocks: int
    hit_tokens: int
    transfer_ms: float
    rest_tokens: int
    compute_ms: float

    @property
    def located(self) -> tuple[Located, ...]:
        """The copies to load, in block order."""
        return tuple(copy.located for copy in self.route.copies[: self.blocks])


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
        seeds = self.seeds
        least = seeds.load_bytes_per_s * seeds.least_load_share
        load = worker.load_bytes_per_s or seeds.load_bytes_per_s
        pace = worker.tokens_per_s or seeds.tokens_per_s
        return Rates(max(pace, _LEAST_TOKENS_PER_S), max(load, least))

    def queue_ms(self, worker: PrefillWorker, rates: Rates) -> float:
        """Until all that waits or runs there now is computed."""
        return worker.waiting_tokens / rates.tokens_per_s * _S_TO_MS

    def slowness(self, copy: Copy, host: str) -> float:
        """How much longer loading takes than from DRAM of ``host`` itself.

        A node that shares memory with nobody has an empty host: all is far from it.
        """
        slowness = 1.0
        if copy.host != host or not host:
            slowness /= self.seeds.remote_share
        if copy.located.slot.tier is Tier.SSD:
            slowness /= self.seeds.ssd_share
        return slowness

    def load_ms(self, ask: Ask, slowness: float, rates: Rates) -> float:
        """One block of this slowness."""
        near_ms = ask.block_bytes / rates.load_bytes_per_s * _S_TO_MS
        return near_ms * slowness + self.seeds.block_overhead_ms

    def best_reuse(self, ask: Ask, route: Route, rates: Rates) -> Reuse:
        """The prefix that makes loading plus computing shortest, on equality the longest.

        Where the network is slow and the worker fast, computing beats loading: then the
        prefix is shorter than what the pool has, or empty. Within a run of equally
        slow copies all or none are worth it, so only the ends of runs are tried.
        """
        saved_ms = ask.block_tokens / rates.tokens_per_s * _S_TO_MS
        transfer_ms = gain_ms = best_gain_ms = best_transfer_ms = 0.0
        length = best_length = 0
        for run in route.runs:
            load_ms = self.load_ms(ask, run.slowness, rates)
            length += run.blocks
            transfer_ms += run.blocks * load_ms
            gain_ms += run.blocks * (saved_ms - load_ms)
            if gain_ms >= best_gain_ms:
                best_length, best_gain_ms = length, gain_ms
                best_transfer_ms = transfer_ms
        return self._reuse(ask, route, best_length, best_transfer_ms, rates)

    def whole_reuse(self, ask: Ask, route: Route, rates: Rates) -> Reuse:
        """The cost of loading all of the route, and computing the rest."""
        transfer_ms = sum(
            run.blocks * self.load_ms(ask, run.slowness, rates) for run in route.runs
        )
        return self._reuse(ask, route, len(route.copies), transfer_ms, rates)

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

    def _reuse(
        self, ask: Ask, route: Route, blocks: int, transfer_ms: float, rates: Rates
    ) -> Reuse:
        rest_tokens = max(0, ask.kv_tokens - blocks * ask.block_tokens)
        return Reuse(
            route=route,
            blocks=blocks,
            hit_tokens=blocks * ask.block_tokens,
            transfer_ms=transfer_ms,
            rest_tokens=rest_tokens,
            compute_ms=rest_tokens / rates.tokens_per_s * _S_TO_MS,
        )


class Routes:
    """The cheapest copies of a request's prefix for each host; equal ones made once."""

    def __init__(self, cost: CostModel, ask: Ask) -> None:
        """For one request."""
        self._cost = cost
        self._prefix = ask.prefix[: ask.reusable_blocks]
        self._holders = {copy.host for block in self._prefix for copy in block}
        self._known: dict[str, Route] = {}

    def to(self, host: str) -> Route:
        """Where a worker on ``host`` would load each block from."""
        # to hosts that hold nothing of it, everything is equally far
        name = host if host in self._holders else ""
        route = self._known.get(name)
        if route is None:
            route = self.through(
                [self._nearest(block, name) for block in self._prefix], name
            )
            self._known[name] = route
        return route

    def through(self, copies: Sequence[Copy], host: str) -> Route:
        """The route that loads exactly these blocks from these copies."""
        runs: list[Run] = []
        for copy in copies:
            slowness = self._cost.slowness(copy, host)
            if runs and runs[-1].slowness == slowness:
                runs[-1] = Run(slowness, runs[-1].blocks + 1)
            else:
                runs.append(Run(slowness, 1))
        return Route(tuple(copies), tuple(runs))

    def _nearest(self, block: Sequence[Copy], host: str) -> Copy:
        return min(block, key=lambda copy: self._cost.slowness(copy, host))
