"""What work takes, as functions of its size. All parameters are in ms and not negative.

An attended pair is a token and one before it, or itself, that it attends to. A prompt of
n tokens of which p are reused has (n - p)(n + p + 1) / 2 of them, so that the time of its
prefill is a polynomial of new and reused tokens, as the paper's cost model has it.
"""

from dataclasses import dataclass

_S_TO_MS = 1000.0


def attended_pairs(new: float, reused: float) -> float:
    """Pairs of ``new`` tokens that follow ``reused`` ones."""
    return new * (new + 2 * reused + 1) / 2


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """The time that computing new tokens takes."""

    fixed_ms: float
    token_ms: float
    pair_ms: float

    @classmethod
    def at(cls, tokens_per_s: float) -> "PrefillCurve":
        """Of a worker of which only a rate is known."""
        return cls(0.0, _S_TO_MS / tokens_per_s, 0.0)

    def ms(self, new: float, reused: float) -> float:
        """For ``new`` tokens after ``reused`` ones; nothing takes no time."""
        if new <= 0:
            return 0.0
        pairs = attended_pairs(new, reused)
        return self.fixed_ms + self.token_ms * new + self.pair_ms * pairs


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """The time that loading blocks takes, from memory of this host and from another's.

    The bytes of one flow from far take ``far_byte_ms`` each, those of one of k flows
    over the same link k times as long.
    """

    fixed_ms: float
    near_byte_ms: float
    far_byte_ms: float

    @classmethod
    def at(cls, bytes_per_s: float, remote_share: float) -> "LoadCurve":
        """Of a worker of which only a rate is known."""
        near = _S_TO_MS / bytes_per_s
        return cls(0.0, near, near / remote_share)


@dataclass(frozen=True, slots=True)
class StepCurve:
    """The time that one decode step of a batch takes."""

    fixed_ms: float
    row_ms: float
    pair_ms: float

    def ms(self, rows: float, kv_tokens: float) -> float:
        """For ``rows`` requests that have ``kv_tokens`` tokens of KV in all."""
        return self.fixed_ms + self.row_ms * rows + self.pair_ms * kv_tokens


@dataclass(frozen=True, slots=True)
class CostSeeds:
    """What is assumed until it was measured.

    The defaults are those of a small model on a few CPU cores. ``remote_share`` and
    ``ssd_share`` are the speed of a copy on another host, or on SSD, as a share of
    that of a copy in this host's memory. A copy of which it isn't sure that it is still
    there counts as slower by ``hint_share``. ``join_share`` is by how much of a batch's
    step one more request in a batch of one makes it longer. ``answer_tokens`` is the
    length that an answer is assumed to have when nothing is known. ``overlap_share`` is
    how much of the shorter of loading and computing the longer one hides.
    ``fill_tokens`` of prompts are computed in one step of a decode worker.

    A load rate below ``least_load_share`` of the assumed one is taken for that share: a
    worker whose first loads went badly would else never be given a load again, and so
    never measure a better rate.
    """

    tokens_per_s: float = 1000.0
    load_bytes_per_s: float = 1e9
    least_load_share: float = 0.1
    remote_share: float = 0.25
    ssd_share: float = 0.25
    hint_share: float = 0.8
    block_overhead_ms: float = 0.2
    self_handover_ms: float = 1.0
    handover_ms: float = 3.0
    remote_handover_ms: float = 8.0
    step_ms: float = 30.0
    join_share: float = 0.3
    answer_tokens: float = 128.0
    overlap_share: float = 0.0
    fill_tokens: float = 64.0

    def fill_ms(self, tokens: float, tbt_ms: float) -> float:
        """Until a decode worker has computed so many of prompts, a piece each step."""
        return tokens / self.fill_tokens * tbt_ms


LEAST_TOKENS_PER_S = 0.01
"""Keeps estimates finite, whatever a worker reports."""


def prefill_curve(tokens_per_s: float, seeds: CostSeeds) -> PrefillCurve:
    """From what a worker reports; 0 is unknown."""
    return PrefillCurve.at(max(tokens_per_s or seeds.tokens_per_s, LEAST_TOKENS_PER_S))


def load_curve(bytes_per_s: float, seeds: CostSeeds) -> LoadCurve:
    """From what a worker reports; 0 is unknown."""
    least = seeds.load_bytes_per_s * seeds.least_load_share
    rate = max(bytes_per_s or seeds.load_bytes_per_s, least)
    return LoadCurve.at(rate, seeds.remote_share)
