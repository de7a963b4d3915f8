"""Where requests go and what that costs: pure functions of loads and copies."""

from kvtide.policy.admission import (
    LEAST_RETRY_MS,
    Overload,
    Prediction,
    Targets,
    TenantTargets,
    overload,
)
from kvtide.policy.choices import (
    EXPLAINED_CANDIDATES,
    Bottleneck,
    Candidate,
    Estimate,
    Placement,
    PlacementPolicy,
    Refusal,
    RefusalCode,
    RestSummary,
)
from kvtide.policy.columns import (
    NO_HOST,
    DecodeColumns,
    Fleet,
    Holdings,
    HostNumbers,
    PrefillColumns,
    fleet_of,
    holdings_of,
    nothing_held,
)
from kvtide.policy.cost import CostModel, DecodeCost, Loader, Plan, Run
from kvtide.policy.curves import CostSeeds, LoadCurve, PrefillCurve, StepCurve
from kvtide.policy.lateness import CrowdFit, Lateness, LatenessFit
from kvtide.policy.readable import ReadablePolicy
from kvtide.policy.rules import PolicyName, PolicyRules, RankRule, ReuseRule, rules_of
from kvtide.policy.scoring import ColumnPolicy
from kvtide.policy.views import Ask, Cluster, Copy, DecodeWorker, PrefillWorker

__all__ = [
    "EXPLAINED_CANDIDATES",
    "LEAST_RETRY_MS",
    "NO_HOST",
    "Ask",
    "Bottleneck",
    "Candidate",
    "Cluster",
    "ColumnPolicy",
    "Copy",
    "CostModel",
    "CostSeeds",
    "CrowdFit",
    "DecodeColumns",
    "DecodeCost",
    "DecodeWorker",
    "Estimate",
    "Fleet",
    "Holdings",
    "HostNumbers",
    "Lateness",
    "LatenessFit",
    "LoadCurve",
    "Loader",
    "Overload",
    "Placement",
    "PlacementPolicy",
    "Plan",
    "PolicyName",
    "PolicyRules",
    "Prediction",
    "PrefillColumns",
    "PrefillCurve",
    "PrefillWorker",
    "RankRule",
    "ReadablePolicy",
    "Refusal",
    "RefusalCode",
    "RestSummary",
    "ReuseRule",
    "Run",
    "StepCurve",
    "Targets",
    "TenantTargets",
    "fleet_of",
    "holdings_of",
    "nothing_held",
    "overload",
    "rules_of",
]
