"""Policies by name. Each is a choice of three rules, which both ways of scoring read."""

from dataclasses import dataclass, replace
from enum import StrEnum


class PolicyName(StrEnum):
    """How requests are placed.

    The paper's baselines, its Algorithm 1, and ``best``: see ``POLICIES``.
    """

    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    LOCAL_CACHE_AWARE = "local_cache_aware"
    ALGORITHM1 = "algorithm1"
    BEST = "best"


class ReuseRule(StrEnum):
    """Which blocks a prefill worker loads.

    ``OWN``: all that its own host holds of the prefix, and no other. ``RATIO``: that,
    and the rest from the host with the longest prefix if that is longer by more than the
    balancing ratio (Algorithm 1). ``CHEAPEST``: from any hosts and tiers at once, as many
    as make loading plus computing shortest.
    """

    OWN = "own"
    RATIO = "ratio"
    CHEAPEST = "cheapest"


class RankRule(StrEnum):
    """Which prefill worker comes first; of equals the first in order.

    ``COMPLETION``: the one with which the whole answer is there first.
    """

    SHUFFLED = "shuffled"
    IN_TURN = "in_turn"
    QUEUE = "queue"
    FIRST_TOKEN = "first_token"  # noqa: S105
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """One policy.

    ``pairs``: besides the least loaded decode worker, the best one on the prefill
    worker's own host is tried with it. Where decode has to compute no more than
    ``direct_blocks`` blocks itself, decode alone is a candidate too. ``pending``: blocks
    that a prefill worker computes for another request count as soon to be its own.
    ``one_node``: see ``on_one_node``.
    """

    name: PolicyName
    reuse: ReuseRule
    rank: RankRule
    pairs: bool = False
    direct_blocks: int = 0
    balancing_ratio: float = 2.0
    pending: bool = False
    one_node: bool = False

    def on_one_node(self) -> "PolicyRules":
        """The same where one node must do both, with the blocks that it has itself."""
        return replace(
            self,
            reuse=ReuseRule.OWN,
            pairs=False,
            direct_blocks=0,
            pending=False,
            one_node=True,
        )


def rules_of(
    name: PolicyName, *, balancing_ratio: float = 2.0, direct_blocks: int = 1
) -> PolicyRules:
    """The rules of a policy. The paper publishes no value for the balancing ratio."""
    match name:
        case PolicyName.RANDOM:
            return PolicyRules(name, ReuseRule.OWN, RankRule.SHUFFLED)
        case PolicyName.ROUND_ROBIN:
            return PolicyRules(name, ReuseRule.OWN, RankRule.IN_TURN)
        case PolicyName.LEAST_LOADED:
            return PolicyRules(name, ReuseRule.OWN, RankRule.QUEUE)
        case PolicyName.LOCAL_CACHE_AWARE:
            return PolicyRules(name, ReuseRule.OWN, RankRule.FIRST_TOKEN)
        case PolicyName.ALGORITHM1:
            return PolicyRules(
                name,
                ReuseRule.RATIO,
                RankRule.FIRST_TOKEN,
                balancing_ratio=balancing_ratio,
            )
        case PolicyName.BEST:
            return PolicyRules(
                name,
                ReuseRule.CHEAPEST,
                RankRule.COMPLETION,
                pairs=True,
                direct_blocks=direct_blocks,
                pending=True,
            )


_MASK_64 = (1 << 64) - 1


def first_in_turn(rules: PolicyRules, turn: int, workers: int) -> int:
    """The position that comes first at this turn, where the rule looks at nothing else."""
    if rules.rank is not RankRule.SHUFFLED:
        return turn % workers
    mixed = (turn + 1) * 0x9E3779B97F4A7C15 & _MASK_64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK_64
    return (mixed ^ (mixed >> 31)) % workers
