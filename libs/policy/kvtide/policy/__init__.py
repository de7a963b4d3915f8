"""Where requests go and what that costs: pure functions of loads and copies."""

from kvtide.policy.algorithm1 import BalancingRatio
from kvtide.policy.candidates import EXPLAINED_CANDIDATES
from kvtide.policy.choices import (
    Candidate,
    Estimate,
    Placement,
    PlacementPolicy,
    Refusal,
    RefusalCode,
    Targets,
)
from kvtide.policy.cost import (
    CostModel,
    CostSeeds,
    DecodeCost,
    Rates,
    Reuse,
    Route,
    Routes,
    Run,
)
from kvtide.policy.least_ttft import LeastTtft
from kvtide.policy.views import Ask, Cluster, Copy, DecodeWorker, PrefillWorker

__all__ = [
    "EXPLAINED_CANDIDATES",
    "Ask",
    "BalancingRatio",
    "Candidate",
    "Cluster",
    "Copy",
    "CostModel",
    "CostSeeds",
    "DecodeCost",
    "DecodeWorker",
    "Estimate",
    "LeastTtft",
    "Placement",
    "PlacementPolicy",
    "PrefillWorker",
    "Rates",
    "Refusal",
    "RefusalCode",
    "Reuse",
    "Route",
    "Routes",
    "Run",
    "Targets",
]
